from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from harness.algorithms.returns import DiscountedReturns
from harness.models.normalise import LIMIT, Normaliser


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 2**31))
def test_statistics_of_parts_are_those_of_the_whole(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, 3, generator=generator) * 5 + 100 for n in sizes]
    normaliser = Normaliser((3,))
    for part in parts:
        normaliser.update(part)
    whole = torch.cat(parts).double()
    torch.testing.assert_close(normaliser.mean, whole.mean(0))
    torch.testing.assert_close(normaliser.variance, whole.var(0, correction=0))
    assert normaliser.count == len(whole)


def test_normalised_values_have_mean_zero_and_variance_one():
    normaliser, values = Normaliser((2,)), torch.randn(1000, 2) * torch.tensor([3.0, 0.1]) + 7
    normaliser.update(values)
    result = normaliser(values)
    torch.testing.assert_close(result.mean(0), torch.zeros(2), atol=1e-3, rtol=0)
    torch.testing.assert_close(result.std(0, correction=0), torch.ones(2), atol=1e-3, rtol=0)


def test_without_any_values_nothing_is_changed():
    normaliser = Normaliser((2,))
    normaliser.update(torch.zeros(0, 2))
    values = torch.tensor([[1.5, -2.5]])
    assert torch.equal(normaliser(values), values)


def test_no_result_is_beyond_the_limit():
    normaliser = Normaliser()
    normaliser.update(torch.tensor([0.0, 1.0]))
    assert normaliser(torch.tensor([1e9, -1e9])).tolist() == [LIMIT, -LIMIT]


def test_rewards_keep_their_sign_when_they_are_scaled():
    normaliser = Normaliser(centre=False)
    normaliser.update(torch.tensor([100.0, 101.0]))
    assert normaliser(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([0.0, 2.0])


def test_a_forward_never_moves_the_statistics():
    normaliser = Normaliser((3,))
    normaliser.update(torch.randn(10, 3))
    before = copy.deepcopy(normaliser.state_dict())
    normaliser.train()
    normaliser(torch.randn(50, 3) * 100)
    for name, value in normaliser.state_dict().items():
        assert torch.equal(value, before[name])


def test_statistics_survive_a_checkpoint():
    normaliser, restored = Normaliser((3,)), Normaliser((3,))
    normaliser.update(torch.randn(10, 3))
    restored.load_statistics(normaliser.statistics())
    later = torch.randn(10, 3)
    for each in (normaliser, restored):
        each.update(later)
    assert torch.equal(normaliser(later), restored(later))


# -- discounted returns


def batch(rewards, done=(), traj_ids=None, mask=None, envs=None):
    rewards = torch.tensor(rewards)
    ended = torch.zeros(rewards.shape, dtype=torch.bool)
    for place in done:
        ended[place] = True
    ids = torch.zeros(rewards.shape, dtype=torch.int64) if traj_ids is None else traj_ids
    env = torch.arange(len(rewards)) if envs is None else torch.tensor(envs)
    return TensorDict(
        {
            "next": {"reward": rewards, "done": ended},
            "collector": {
                "traj_ids": torch.as_tensor(ids),
                "mask": torch.ones_like(ended) if mask is None else torch.tensor(mask),
                "worker": torch.zeros_like(rewards, dtype=torch.int64),
                "env": env.unsqueeze(1).expand(rewards.shape),
            },
        },
        batch_size=rewards.shape,
    )


def test_the_sum_goes_on_from_batch_to_batch():
    sums = DiscountedReturns(0.5)
    assert sums.follow(batch([[1.0, 1.0, 1.0]])).tolist() == [[1.0, 1.5, 1.75]]
    assert sums.follow(batch([[1.0, 1.0]])).tolist() == [[1.875, 1.9375]]


def test_the_sum_starts_anew_with_an_episode():
    sums = DiscountedReturns(0.5)
    first = batch([[1.0, 1.0, 1.0]], done=[(0, 1)], traj_ids=[[0, 0, 1]])
    assert sums.follow(first).tolist() == [[1.0, 1.5, 1.0]]
    second = batch([[1.0]], traj_ids=[[2]])  # another trajectory than the one that was open
    assert sums.follow(second).tolist() == [[1.0]]


def test_an_episode_that_ends_with_a_batch_leaves_no_sum():
    """Also not to a trajectory of the same number, which a resumed run may use again."""
    sums = DiscountedReturns(0.5)
    sums.follow(batch([[1.0, 1.0]]))
    sums.follow(batch([[1.0, 1.0]], done=[(0, 1)]))
    assert sums.follow(batch([[1.0]])).tolist() == [[1.0]]


def test_each_environment_has_its_own_sum_in_whatever_order_batches_come():
    sums = DiscountedReturns(0.5)
    sums.follow(batch([[4.0]], envs=[0], traj_ids=[[10]]))
    sums.follow(batch([[8.0]], envs=[1], traj_ids=[[11]]))
    assert sums.follow(batch([[0.0]], envs=[0], traj_ids=[[10]])).tolist() == [[2.0]]
    assert sums.follow(batch([[0.0]], envs=[1], traj_ids=[[11]])).tolist() == [[4.0]]


def test_padding_is_no_reward_and_ends_nothing():
    sums = DiscountedReturns(0.5)
    sums.follow(batch([[1.0, 99.0]], mask=[[True, False]], done=[(0, 1)]))
    assert sums.follow(batch([[0.0]])).tolist() == [[0.5]]


def test_a_frame_that_is_only_a_reset_may_lie_within_a_row():
    """As it does with environments that reset in the step after an episode's last."""
    sums = DiscountedReturns(0.5)
    mask, traj_ids = [[True, True, False, True]], [[0, 0, 0, 1]]
    first = batch([[1.0, 1.0, 99.0, 4.0]], mask=mask, done=[(0, 1)], traj_ids=traj_ids)
    assert sums.follow(first)[0, [0, 1, 3]].tolist() == [1.0, 1.5, 4.0]
    assert sums.follow(batch([[1.0]], traj_ids=[[1]])).tolist() == [[3.0]]


def test_sums_survive_a_checkpoint():
    sums, restored = DiscountedReturns(0.5), DiscountedReturns(0.5)
    sums.follow(batch([[0.1], [0.7]]))
    restored.load_state_dict(sums.state_dict())
    later = batch([[1.0], [1.0]])
    assert torch.equal(sums.follow(later), restored.follow(later))
    DiscountedReturns(0.5).load_state_dict(DiscountedReturns(0.5).state_dict())
