"""Samples by priority, and n-step transitions over the borders of batches."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from collectors import Collector, MultiAsyncCollector
from collectors.data.prioritised_replay import PrioritisedReplayBuffer, SumTree
from tests.collectors.support import same_bits

GAMMA = 0.5


def rows(*envs, env=0):
    """A batch [envs, time]: a row is the numbers of its frames, each with how its episode goes on.

    Frame `n` has observation n, reward n and leads to observation n + 1; "T" after it says that its
    episode terminates, "C" that it is cut. An environment's trajectory is numbered by its first.
    """
    fields = [[_frame(one, number) for one in row] for number, row in enumerate(envs, env)]
    return torch.stack([torch.stack(row) for row in fields])


def _frame(said, env):
    text = str(said)
    number = float(text.rstrip("TC"))
    terminated, truncated = text.endswith("T"), text.endswith("C")
    return TensorDict(
        {
            "observation": torch.tensor([number]),
            "action": torch.tensor(int(number)),
            "policy_version": torch.tensor(int(number) // 10),
            "next": {
                "observation": torch.tensor([number + 1]),
                "reward": torch.tensor(number),
                "terminated": torch.tensor(terminated),
                "truncated": torch.tensor(truncated),
                "done": torch.tensor(terminated or truncated),
            },
            "collector": {
                "mask": torch.tensor(True),
                "env": torch.tensor(env),
                "traj_ids": torch.tensor(int(number) // 100),
            },
        }
    )


def buffer_of(*batches, capacity=32, num_steps=3, **options):
    buffer = PrioritisedReplayBuffer(capacity, num_steps=num_steps, gamma=GAMMA, **options)
    for batch in batches:
        buffer.extend(batch)
    return buffer


def transition(buffer, place):
    """Of a frame: return, last next observation, discount, terminated."""
    one = buffer.sample(places=torch.tensor([place]))[0]
    reward, seen = float(one["next", "reward"]), float(one["next", "observation"])
    return reward, seen, float(one["replay", "discount"]), bool(one["next", "terminated"])


# -- n-step returns by hand


def test_rewards_add_up_over_so_many_frames():
    buffer = buffer_of(rows([1, 2, 3, 4, 5]))
    assert transition(buffer, 0) == (1 + 2 / 2 + 3 / 4, 4, 1 / 8, False)
    assert transition(buffer, 1) == (2 + 3 / 2 + 4 / 4, 5, 1 / 8, False)


def test_sums_from_the_newest_frames_have_fewer_terms():
    buffer = buffer_of(rows([1, 2, 3]))
    assert transition(buffer, 1) == (2 + 3 / 2, 4, 1 / 4, False)
    assert transition(buffer, 2) == (3, 4, 1 / 2, False)


def test_a_termination_ends_the_sum_and_says_so():
    buffer = buffer_of(rows([1, "2T", 103, 104]))
    assert transition(buffer, 0) == (1 + 2 / 2, 3, 1 / 4, True)
    assert transition(buffer, 1) == (2, 3, 1 / 2, True)
    assert transition(buffer, 2) == (103 + 104 / 2, 105, 1 / 4, False)


def test_a_truncation_ends_the_sum_and_shows_the_true_next_observation():
    buffer = buffer_of(rows([1, "2C", 103, 104]))
    assert transition(buffer, 0) == (1 + 2 / 2, 3, 1 / 4, False)
    assert buffer.sample(places=torch.tensor([0]))["next", "truncated"].all()


def test_an_episode_that_a_reset_ended_without_a_mark_goes_no_further():
    buffer = buffer_of(rows([1, 2, 103, 104]))
    assert transition(buffer, 0) == (1 + 2 / 2, 3, 1 / 4, False)


def test_a_trajectory_goes_on_over_batches_with_others_in_between():
    first = rows([1, 2], [11, 12])
    other = rows([21, 22], env=2)
    second = rows([3, 4], ["13T", 113])
    buffer = buffer_of(first, other, second)
    assert transition(buffer, 0) == (1 + 2 / 2 + 3 / 4, 4, 1 / 8, False)
    assert transition(buffer, 1) == (2 + 3 / 2 + 4 / 4, 5, 1 / 8, False)
    assert transition(buffer, 3) == (12 + 13 / 2, 14, 1 / 4, True)
    assert transition(buffer, 5) == (22, 23, 1 / 2, False)


def test_frames_that_are_missing_are_not_jumped_over():
    buffer = buffer_of(rows([1, 2]), rows([5, 6]))
    assert transition(buffer, 0) == (1 + 2 / 2, 3, 1 / 4, False)
    assert transition(buffer, 1) == (2, 3, 1 / 2, False)


def test_padding_is_left_out():
    batch = rows([1, 2, 0], [11, 12, 13])
    batch["collector", "mask"][0, 2] = False
    buffer = buffer_of(batch, rows([3], [14]))
    assert len(buffer) == 7
    assert transition(buffer, 1) == (2 + 3 / 2, 4, 1 / 4, False)
    assert transition(buffer, 2) == (11 + 12 / 2 + 13 / 4, 14, 1 / 8, False)


def test_frames_that_were_overwritten_are_not_followed():
    buffer = buffer_of(rows([1, 2, 3, 4]), rows([21, 22], env=1), capacity=4)
    buffer.extend(rows([5, 6]))  # follows frame 4, which is in place 3; overwrites places 2 and 3
    found = {float(one["observation"]): one for one in buffer.sample(places=torch.arange(4))}
    assert found.keys() == {21, 22, 5, 6}
    assert float(found[22]["next", "reward"]) == 22
    assert float(found[5]["next", "reward"]) == 5 + 6 / 2
    later = buffer_of(rows([1, 2, 3, 4, 5, 6]), capacity=4)  # a batch larger than the buffer
    found = {float(one["observation"]): one for one in later.sample(places=torch.arange(4))}
    assert float(found[3]["next", "reward"]) == 3 + 4 / 2 + 5 / 4


def test_all_entries_outside_next_are_those_of_the_first_frame():
    buffer = buffer_of(rows([8, 9, 10, 11]))
    one = buffer.sample(places=torch.tensor([1]))[0]
    assert (one["observation"], one["action"], one["policy_version"]) == (9, 9, 0)


def test_one_step_is_the_frame_itself():
    batch = rows([1, "2T", 103])
    buffer = buffer_of(batch, num_steps=1)
    sample = buffer.sample(places=torch.arange(3))
    assert same_bits(sample.exclude("replay"), batch[0])
    assert (sample["replay", "discount"] == GAMMA).all()


def naive(frames, rows, start, num_steps):
    """The transition of a frame by following its environment's frames one by one.

    rows: the environment and the trajectory of each frame.
    """
    total, discount, index = 0.0, 1.0, start
    for _ in range(num_steps):
        one = frames[index]
        total += discount * float(one["next", "reward"])
        discount *= GAMMA
        later = [i for i in range(index + 1, len(frames)) if rows[i] == rows[index]]
        if one["next", "done"] or not later:
            break
        last, index = index, later[0]
        assert torch.equal(frames[last]["next", "observation"], frames[index]["observation"])
    return total, discount, one["next", "observation"], one["next", "terminated"]


def made(worker_idx=None):
    return SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=13)] * 2)


def by_chance(observation):
    return torch.randint(2, observation.shape[:1])


@pytest.mark.parametrize("kind", [Collector, MultiAsyncCollector])
def test_frames_of_collectors_give_the_sums_that_a_plain_search_finds(kind):
    options = {} if kind is Collector else {"num_workers": 2}
    buffer = PrioritisedReplayBuffer(500, num_steps=4, gamma=GAMMA)
    with kind(made, by_chance, frames_per_batch=28, seed=3, **options) as collector:
        for _ in range(8):
            buffer.extend(collector.next())
    frames = buffer[:]
    samples = buffer.sample(places=torch.arange(len(buffer)))
    assert frames["next", "truncated"].any()
    numbers = (frames["collector", name].tolist() for name in ("env", "traj_ids"))
    rows = list(zip(*numbers, strict=True))
    for index, sample in enumerate(samples):
        total, discount, seen, terminated = naive(frames, rows, index, 4)
        assert float(sample["next", "reward"]) == pytest.approx(total)
        assert float(sample["replay", "discount"]) == pytest.approx(discount)
        assert torch.equal(sample["next", "observation"], seen)
        assert sample["next", "terminated"] == terminated


def test_a_collector_may_fill_it_alone():
    buffer = PrioritisedReplayBuffer(300, num_steps=3, gamma=1.0, exponent=0.5, seed=0)
    options = {"num_workers": 2, "frames_per_batch": 20, "total_frames": 2000}
    with MultiAsyncCollector(made, by_chance, replay_buffer=buffer, **options) as collector:
        collector.start()
        while buffer.wait(buffer.written + 1, 30.0) < 2000:
            sample = buffer.sample(32)
            ends = sample["next", "done"]
            whole = sample["replay", "discount"] == 1
            assert whole.all()
            assert set(sample["next", "reward"].tolist()) <= {1, 2, 3}
            assert not (sample["next", "terminated"] & ~ends).any()
            buffer.prioritise(sample["replay", "serial"], torch.rand(32))


# -- the sum tree


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 40),
    changes=st.lists(st.tuples(st.integers(0, 39), st.floats(0, 100)), min_size=1, max_size=60),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_a_sum_tree_finds_what_cumulative_sums_find(capacity, changes, draws):
    tree, values = SumTree(capacity), np.zeros(capacity)
    for group in (changes[i : i + 7] for i in range(0, len(changes), 7)):
        places = np.array([place % capacity for place, _ in group])
        given_values = np.array([value for _, value in group])
        tree.set(places, given_values)
        for place, value in zip(places, given_values, strict=True):
            values[place] = value
    assert np.array_equal(tree.values, values)
    assert tree.total == pytest.approx(values.sum())
    if not tree.total:
        return
    sums = np.array(draws) * tree.total
    found, running = tree.find(sums), np.cumsum(values)
    assert (values[found] > 0).all()
    slack = 1e-9 * tree.total
    assert (sums <= running[found] + slack).all()
    assert (sums >= running[found] - values[found] - slack).all()


def test_equal_numbers_give_equal_trees_however_they_came():
    rng = np.random.default_rng(0)
    final = rng.random(100)
    first, second = SumTree(100), SumTree(100)
    for _ in range(50):
        first.set(rng.integers(0, 100, 8), rng.random(8))
    first.set(np.arange(100), final)
    for place in rng.permutation(100):
        second.set(np.array([place]), final[[place]])
    sums = rng.random(1000) * first.total
    assert first.total == second.total
    assert np.array_equal(first.find(sums), second.find(sums))


# -- priorities


def test_frames_are_drawn_in_proportion_to_their_priorities():
    buffer = buffer_of(rows([1, 2, 3, 4]), num_steps=1, exponent=0.5, seed=0)
    priorities = torch.tensor([1.0, 4.0, 9.0, 16.0])
    buffer.prioritise(torch.arange(4), priorities)
    sample = buffer.sample(20_000)
    counts = torch.bincount(sample["observation"].long().flatten(), minlength=5)[1:]
    expected = priorities.sqrt() / priorities.sqrt().sum()
    torch.testing.assert_close(counts / 20_000, expected, rtol=0.01, atol=0)
    shares = buffer.sample(places=torch.arange(4))["replay", "share"]
    torch.testing.assert_close(shares, expected * 4)


def test_samples_are_stratified():
    buffer = buffer_of(rows([1, 2, 3, 4]), num_steps=1, exponent=1.0, seed=0)
    for _ in range(20):
        assert buffer.sample(4)["observation"].flatten().tolist() == [1, 2, 3, 4]


def test_samples_differ_from_draw_to_draw():
    buffer = buffer_of(rows(list(range(100))), capacity=100, num_steps=1, exponent=0.6, seed=1)
    draws = [tuple(buffer.sample(20)["replay", "serial"].tolist()) for _ in range(3)]
    assert len(set(draws)) == 3


def test_new_frames_have_the_highest_priority_that_was_given():
    buffer = buffer_of(rows([1, 2]), exponent=1.0)
    buffer.prioritise(torch.tensor([0, 1]), torch.tensor([5.0, 0.5]))
    buffer.extend(rows([3, 4]))
    buffer.prioritise(torch.tensor([0]), torch.tensor([1.0]))
    shares = buffer.sample(places=torch.arange(4))["replay", "share"]
    torch.testing.assert_close(shares, torch.tensor([1, 0.5, 5, 5]) * 4 / 11.5)


def test_the_priority_of_a_frame_that_is_gone_changes_nothing():
    buffer = buffer_of(rows([1, 2, 3, 4]), capacity=4, exponent=1.0)
    serials = buffer.sample(places=torch.arange(4))["replay", "serial"]
    buffer.extend(rows([5, 6]))
    buffer.prioritise(serials, torch.tensor([100.0, 100.0, 1.0, 3.0]))
    sample = buffer.sample(places=torch.arange(4))
    torch.testing.assert_close(sample["replay", "share"], torch.tensor([1, 1, 1, 3.0]) * 4 / 6)
    assert sample["replay", "serial"].tolist() == [4, 5, 2, 3]


def test_a_buffer_without_an_exponent_draws_as_a_plain_buffer_does():
    buffer = buffer_of(rows([1, 2, 3, 4]), seed=5)
    buffer.prioritise(torch.arange(4), torch.rand(4))
    drawn = torch.randint(4, (50,), generator=torch.Generator().manual_seed(5)) + 1
    sample = buffer.sample(50)
    assert torch.equal(sample["observation"].flatten().long(), drawn)
    assert (sample["replay", "share"] == 1).all()


@pytest.mark.parametrize("exponent", [None, 0.6])
def test_a_saved_buffer_goes_on_to_the_bit(exponent):
    options = {"capacity": 7, "exponent": exponent}
    first = buffer_of(rows([1, 2, 3], [11, 12, 13]), **options, seed=1)
    first.prioritise(torch.arange(4), torch.tensor([0.3, 2.0, 0.1, 0.7]))
    first.sample(3)
    second = buffer_of(**options)
    second.load_state_dict(first.state_dict())
    for buffer in (first, second):
        buffer.extend(rows([4, "5T"], [14, 15]))
        buffer.prioritise(torch.tensor([5, 6]), torch.tensor([0.2, 0.4]))
    assert transition(first, 5) == transition(second, 5) == (13 + 14 / 2 + 15 / 4, 16, 1 / 8, False)
    for _ in range(3):
        assert same_bits(first.sample(20), second.sample(20))
