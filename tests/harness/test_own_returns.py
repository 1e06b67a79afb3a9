"""`episode/return` and `eval/return` are the environment's own, whatever wrappers make of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import run
from collectors import Collector
from harness.environments.evaluate import Evaluator
from harness.environments.factory import EnvFactory, alters_returns, single
from harness.environments.wrappers import (
    FIRST,
    KEY,
    LENGTH,
    OVER,
    UNKNOWN,
    OwnEpisode,
    ReportOwnEpisode,
)
from harness.measures.episodes import Episodes
from harness.options import EnvConfig
from harness.run.checkpoints import Checkpoints
from harness.run_comparison import compare_records, compare_weights
from tests.harness.scored import Scored
from tests.harness.test_run import records, start

pytestmark = pytest.mark.usefixtures("here")

CLIP = {"clip_reward": {"min_reward": -1.0, "max_reward": 1.0}}
ENV = "tests.harness.scored:Scored-v0"
RUN = (
    *(f"env.id={ENV}", "env.wrappers=[{clip_reward: {min_reward: -1, max_reward: 1}}]"),
    *("total_frames=384", "collector.frames_per_batch=64", "env.num_envs=4"),
    *("algo.minibatch_size=64", "algo.epochs=1", "evaluation.num_episodes=2", "logger=jsonl"),
)


def read(frames: int = 128, max_frames_per_traj: int | None = None, **config) -> dict[str, float]:
    """What is measured of so many frames."""
    described = EnvConfig(id=ENV, **config)
    collector = Collector(
        EnvFactory(described),
        None,
        frames_per_batch=32,
        total_frames=frames,
        max_frames_per_traj=max_frames_per_traj,
        seed=0,
        info_keys={KEY: UNKNOWN} if alters_returns(described) else (),
    )
    episodes = Episodes()
    try:
        for batch in collector:
            episodes.add(batch)
    finally:
        collector.shutdown()
    return episodes.read()


VECTORS = {
    "none": {"vectorisation": "none", "num_envs": 1},
    "sync": {"vectorisation": "sync", "num_envs": 2},
    "async": {"vectorisation": "async", "num_envs": 2},
    "native, NextStep": {"vectorisation": "native", "num_envs": 2},
    "native, SameStep": {
        **{"vectorisation": "native", "num_envs": 2},
        "kwargs": {"mode": "SameStep"},
    },
}


@pytest.mark.parametrize("vector", VECTORS)
def test_returns_are_counted_before_rewards_are_clipped(vector):
    found = read(wrappers=[CLIP], **VECTORS[vector])
    assert found.pop("episode/count") >= 14
    assert found == {"episode/return": 9, "episode/length": 7, "episode/wrapped_return": 3}


@pytest.mark.parametrize("vector", ["none", "sync", "async"])
@pytest.mark.parametrize(
    ("wrapper", "wrapped"),
    [
        ({"repeat_action": {"num_repeats": 2}}, None),
        ("tests.harness.scored:Silent", 18),
        ("tests.harness.scored:Lives", None),
    ],
    ids=["repeat_action", "silent", "lives"],
)
def test_steps_and_ends_are_the_environments_own(vector, wrapper, wrapped):
    found = read(wrappers=[wrapper], **VECTORS[vector])
    assert found["episode/return"] == 9
    assert found["episode/length"] == 7
    assert found.get("episode/wrapped_return") == wrapped


def test_a_truncated_episode_of_the_environment_is_over():
    own = OwnEpisode(gym.wrappers.TimeLimit(Scored(), 3))
    env = ReportOwnEpisode(own, own)
    env.reset()
    told = [env.step(0)[-1][KEY] for _ in range(3)]
    assert [counts[LENGTH] for counts in told] == [1, 2, 3]
    assert [counts[OVER] for counts in told] == [0, 0, 1]
    assert [counts[FIRST] for counts in told] == [1, 0, 0]


@pytest.mark.parametrize("wrappers", [[], [CLIP]], ids=["plain", "clipped"])
def test_what_the_collector_cuts_counts_as_an_episode(wrappers):
    found = read(320, 5, wrappers=wrappers, num_envs=2)
    assert found["episode/return"] == 7
    assert found["episode/length"] == 5
    assert found.get("episode/wrapped_return") == (2 if wrappers else None)


@pytest.mark.parametrize(
    ("wrapper", "alters"),
    [("time_aware", False), ("flatten_observation", False), (CLIP, True), ("atari", True)],
)
def test_only_where_wrappers_may_alter_returns_are_they_told_beside(wrapper, alters):
    assert alters_returns(EnvConfig(wrappers=[wrapper])) is alters


class Always(torch.nn.Module):
    def forward(self, observation):
        return torch.zeros(len(observation), dtype=torch.int64)


@pytest.mark.parametrize(
    "wrapper",
    [
        *(CLIP, {"repeat_action": {"num_repeats": 2}}),
        *("tests.harness.scored:Silent", "tests.harness.scored:Lives"),
    ],
    ids=["clipped", "repeated", "silent", "lives"],
)
def test_an_evaluation_is_of_the_environments_own_episodes(wrapper):
    env = single(EnvConfig(id=ENV, wrappers=[wrapper]))
    with closing(Evaluator(EnvFactory(env), episodes=3)) as evaluator:
        for _ in range(2):
            found = evaluator.run(Always())
            own = {"eval/return": 9, "eval/return_std": 0, "eval/length": 7}
            assert found == own | {"eval/return_sampled": 9}


# -- the bookkeeping by hand


def batch(told, rewards, done, env=0):
    length = len(rewards)
    shaped = {
        "is_init": torch.zeros(length, dtype=torch.bool),
        "next": {
            "reward": torch.tensor(rewards, dtype=torch.float32),
            "done": torch.tensor(done, dtype=torch.bool),
            "info": {KEY: torch.tensor(told, dtype=torch.float64)},
        },
        "collector": {
            "traj_ids": torch.zeros(length, dtype=torch.int64),
            "env": torch.full((length,), env),
            "mask": torch.ones(length, dtype=torch.bool),
        },
    }
    return TensorDict(shaped, [length]).unsqueeze(0)


def test_a_life_lost_at_the_end_of_a_batch_ends_no_episode_that_goes_on():
    episodes = Episodes()
    episodes.add(batch([[3, 1, 0, 1], [1, 2, 0, 0]], [1, -1], [0, 1]))
    assert episodes.read() == {}
    resumed = Episodes()
    resumed.load_state_dict(episodes.state_dict())
    resumed.add(batch([[6, 3, 1, 0]], [1], [1]))
    found = {"episode/return": 6, "episode/length": 3, "episode/count": 1}
    assert resumed.read() == {**found, "episode/wrapped_return": 1}


def test_an_episode_cut_at_the_end_of_a_batch_counts_once_another_one_starts():
    episodes = Episodes()
    episodes.add(batch([[3, 1, 0, 1], [1, 2, 0, 0]], [3, -2], [0, 1]))
    episodes.add(batch([[3, 1, 0, 1]], [3], [0]))
    assert episodes.read() == {"episode/return": 1, "episode/length": 2, "episode/count": 1}


def test_an_episode_goes_on_where_only_later_environments_made_frames():
    counted = torch.zeros(2, 2, 4)  # return, length, over, first: of the second environment
    counted[1] = torch.tensor([[1.0, 3.0, 0.0, 0.0], [5.0, 4.0, 1.0, 0.0]])
    is_second = torch.tensor([[False, False], [True, True]])
    batch = TensorDict(
        {
            "collector": {"mask": is_second, "traj_ids": torch.zeros(2, 2, dtype=torch.int64)},
            "next": {
                "reward": torch.ones(2, 2),
                "done": torch.tensor([[False, False], [False, True]]),
                "info": {KEY: counted},
            },
        },
        batch_size=[2, 2],
    )
    batch["collector", "env"] = is_second.long()
    episodes = Episodes()
    episodes.add(batch)
    read = episodes.read()
    assert (read["episode/return"], read["episode/length"]) == (5.0, 4.0)


def test_an_episode_left_without_an_end_counts_for_nothing():
    episodes = Episodes()
    episodes.add(batch([[3, 1, 0, 1], [1, 2, 0, 0]], [3, -2], [0, 0]))
    episodes.add(batch([[3, 1, 0, 1]], [3], [0]))
    assert episodes.read() == {}


def test_once_a_wrapper_altered_a_return_both_are_logged():
    episodes = Episodes()
    episodes.add(batch([[3, 1, 1, 1]], [1], [1]))
    assert episodes.read()["episode/wrapped_return"] == 1
    episodes.add(batch([[1, 1, 1, 1]], [1], [1]))
    assert episodes.read()["episode/wrapped_return"] == 1


# -- whole runs


@pytest.mark.parametrize(
    "collector",
    [
        ("collector=single",),
        ("collector=multi_sync",),
        ("collector=multi_async",),
        ("collector=multi_async", "env.vectorisation=native"),
        ("collector=simulated", "collector.num_workers=3"),
        pytest.param(("collector=distributed", "sync=distributed"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_runs_log_own_and_wrapped_returns_under_every_collector(collector):
    status, directory = start(*RUN, *collector)
    assert status == 0
    told = [record for record in records(directory) if "episode/return" in record]
    assert told
    for record in told:
        names = ("episode/return", "episode/length", "episode/wrapped_return")
        assert [record[name] for name in names] == [9, 7, 3]
    assert records(directory)[-1]["eval/return"] == 9


def test_a_replay_buffer_that_is_filled_beside_the_learner_tells_them_too():
    clipped = "env.wrappers=[{clip_reward: {min_reward: -1, max_reward: 1}}]"
    status, directory = start(
        *("algo=sac", "env=pendulum", clipped, "env.max_episode_steps=8", "total_frames=128"),
        *("collector=multi_async", "collector.free_running=true", "collector.frames_per_batch=16"),
        *("env.num_envs=2", "algo.learning_starts=32", "algo.batch_size=16", "logger=jsonl"),
        *("evaluation.at_end=false", "model.hidden_sizes=[8]", "algo.updates_per_frame=0.1"),
    )
    assert status == 0
    told = [record for record in records(directory) if "episode/return" in record]
    assert told
    assert all(record["episode/length"] == 8 for record in told)
    assert all(record["episode/wrapped_return"] >= record["episode/return"] for record in told)


@pytest.mark.parametrize(
    "given",
    [
        ("collector.max_frames_per_traj=5",),
        ("env.id=tests.harness.scored:Pictured-v0", "model=minatar_cnn_lstm", "model.lstm_size=8"),
    ],
    ids=["cut", "CNN and LSTM"],
)
def test_a_resumed_run_has_the_same_bits(given):
    whole = (*RUN, *given, "collector=single", "checkpoint.every_frames=64", "checkpoint.keep=99")
    first, again = Path("whole"), Path("again")
    assert start(*whole, into="whole")[0] == 0
    assert start(*whole, into="again")[0] == 0
    assert compare_records(first, again) is None
    for file in Checkpoints(again / "checkpoints").files()[3:]:
        file.unlink()
    env_id = next(text for text in reversed(whole) if text.startswith("env.id="))
    assert run.main(["resume=again", env_id]) == 0
    assert compare_records(first, again) is None
    assert compare_weights(first, again) is None


def test_the_wrapper_that_tells_is_the_outermost_one():
    env = EnvFactory(single(EnvConfig(id=ENV, wrappers=["tests.harness.scored:Silent"])))()
    assert isinstance(env, gym.Env)
    env.reset(seed=0)
    tuples = [env.step(0) for _ in range(2)]
    np.testing.assert_array_equal([info[KEY] for *_, info in tuples], [[3, 1, 0, 1], [1, 2, 0, 0]])
