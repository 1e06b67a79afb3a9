"""What is kept of current episodes: the state of a recurrent policy, and actions to replay."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from collectors.rollout.episode_replay import EpisodeReplay
from collectors.rollout.recurrent_state import History


def called(history: History) -> list[float]:
    return [float(step.observations[0][0]) for step in history.steps]


def test_a_history_begins_with_the_oldest_current_episode():
    history, row, is_init = History(3), torch.zeros(3), np.zeros(3, bool)
    for call in range(5):
        row.fill_(call)
        is_init[...] = call == 0
        if call == 2:
            history.zero(np.array([True, False, False]))
        if call == 3:
            history.zero(np.array([False, True, True]))
        history.add([row], is_init)
    assert called(history) == [0, 1, 2, 3, 4]
    assert [step.is_init.all() for step in history.steps] == [True, False, False, False, False]
    assert [step.zeroed.tolist() for step in history.steps] == [
        [True] * 3,
        [False] * 3,
        [True, False, False],
        [False, True, True],
        [False] * 3,
    ]
    history.trim()
    assert called(history) == [2, 3, 4]
    history.zero(np.array([True, False, False]))
    history.trim()
    assert called(history) == [3, 4]
    other = History(3)
    other.load_state_dict(history.state_dict())
    for one in (history, other):
        one.add([row], is_init)
        one.zero(np.array([False, True, False]))
        one.trim()
        assert called(one) == [3, 4, 4]  # the third environment's episode began with call 3
        one.zero(np.array([False, False, True]))
        one.trim()
        assert called(one) == [4]
    assert repr(history.state_dict()) == repr(other.state_dict())
    history.zero(None)
    history.trim()
    assert called(history) == []


class Numbered(gym.Wrapper):
    """Counts the steps of its episode, and ends none."""

    steps = -1

    def reset(self, **options):
        self.steps = 0
        return super().reset(**options)

    def step(self, action):
        self.steps += 1
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


def members() -> list[gym.Env]:
    return [Numbered(gym.make("CartPole-v1").unwrapped) for _ in range(2)]


def played(envs: list[gym.Env], replay: EpisodeReplay) -> list[np.ndarray]:
    """The second episode of the second environment begins at the fourth step."""
    both, seeds = np.array([True, True]), [5, 6]
    replay.reset(both, seeds)
    seen = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    for step in range(7):
        if step == 3:
            replay.reset(~np.array([True, False]), None)
            seen[1] = envs[1].reset()[0]
        actions = np.array([step % 2, step // 2 % 2])
        replay.actions.append(actions)
        seen = [env.step(int(one))[0] for env, one in zip(envs, actions, strict=True)]
    return seen


def test_current_episodes_are_played_again_and_recorded_as_before():
    envs = members()
    replay = EpisodeReplay(envs)
    seen = played(envs, replay)
    states = replay.state_dict()
    assert [sorted(state) for state in states] == [
        ["actions", "attributes", "seed"],
        ["actions", "attributes", "rng"],
    ]
    assert states[0]["actions"].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert states[1]["actions"].tolist() == [1, 0, 0, 1]
    assert [state["attributes"]["Numbered.steps"] for state in states] == [7, 4]

    others = members()
    second = EpisodeReplay(others)
    (first_seen, _), (second_seen, reward) = second.repeat(states, int)
    assert np.array_equal(first_seen, seen[0])
    assert np.array_equal(second_seen, seen[1])
    assert reward == 1.0
    assert second.differences(states) == []
    others[1].steps = 5
    assert second.differences(states) == ["the environment's attribute 'Numbered.steps'"]
    others[1].steps = 4
    again = second.state_dict()
    for one, other in zip(again, states, strict=True):
        assert one["actions"].tolist() == other["actions"].tolist()
        assert {name: one.get(name) for name in ("seed", "rng")} == {
            name: other.get(name) for name in ("seed", "rng")
        }


def test_actions_of_ended_episodes_are_forgotten(monkeypatch):
    envs = members()
    replay = EpisodeReplay(envs)
    played(envs, replay)
    replay.trim()
    assert len(replay.actions) == 7  # the first episode goes on
    replay.reset(np.array([True, False]), None)
    before = replay.state_dict()[1]["actions"].tolist()
    replay.trim()
    assert len(replay.actions) == 4
    assert replay.state_dict()[1]["actions"].tolist() == before == [1, 0, 0, 1]
    monkeypatch.setattr("collectors.rollout.episode_replay.LONGEST", 4)
    replay.trim()
    assert len(replay.actions) == 4
    replay.actions.append(np.array([1, 1]))
    replay.trim()  # five steps are too long
    assert replay.actions == []
    assert replay.state_dict() == [{}, {}]


@pytest.mark.parametrize("number", [1, 3])
def test_states_of_other_environments_are_not_replayed(number):
    replay = EpisodeReplay(members())
    assert replay.repeat([{"seed": 1, "actions": torch.zeros(0)}] * number, int) is None
