from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.algorithms.returns import (
    Returns,
    Steps,
    continues,
    discounted,
    explained_variance,
    gae,
    vtrace,
)

GAMMA, LAM = 0.9, 0.8


def steps(
    reward: list[float],
    value: list[float],
    next_value: list[float],
    *,
    terminated: tuple[int, ...] = (),
    breaks: tuple[int, ...] = (),
    padding: int = 0,
) -> Steps:
    """One row; `breaks`: where a trajectory ends without being terminated."""
    num = len(reward)
    mask = torch.ones(1, num, dtype=torch.bool)
    mask[:, num - padding :] = False
    ended = torch.zeros(1, num, dtype=torch.bool)
    ended[:, list(terminated)] = True
    done = ended.clone()
    done[:, list(breaks)] = True
    rows = [torch.tensor([x], dtype=torch.float64) for x in (reward, value, next_value)]
    return Steps(*rows, ended, continues(done, torch.zeros(1, num), mask), mask)


# -- GAE


def test_advantages_of_two_steps_that_a_batch_cuts():
    row = steps([1.0, 2.0], [0.5, 0.25], [0.25, 4.0])
    second = 2.0 + GAMMA * 4.0 - 0.25
    first = 1.0 + GAMMA * 0.25 - 0.5 + GAMMA * LAM * second
    result = gae(row, gamma=GAMMA, lam=LAM)
    assert result.advantages.tolist() == [pytest.approx([first, second])]
    assert result.targets.tolist() == [pytest.approx([first + 0.5, second + 0.25])]


def test_a_terminated_step_is_worth_its_reward_alone():
    row = steps([1.0, 2.0], [0.5, 0.25], [99.0, 99.0], terminated=(0, 1))
    assert gae(row, gamma=GAMMA, lam=LAM).advantages.tolist() == [pytest.approx([0.5, 1.75])]


def test_a_truncated_step_is_worth_what_truly_followed_it():
    row = steps([1.0, 2.0], [0.5, 0.25], [3.0, 4.0], breaks=(0,))
    first, second = 1.0 + GAMMA * 3.0 - 0.5, 2.0 + GAMMA * 4.0 - 0.25
    assert gae(row, gamma=GAMMA, lam=LAM).advantages.tolist() == [pytest.approx([first, second])]


def test_padding_is_nothing_whatever_it_holds():
    nan = float("nan")
    row = steps([1.0, nan, nan], [0.5, nan, nan], [3.0, nan, nan], padding=2)
    result = gae(row, gamma=GAMMA, lam=LAM)
    assert result.advantages.tolist() == [pytest.approx([1.0 + GAMMA * 3.0 - 0.5, 0.0, 0.0])]
    assert result.targets.tolist() == [pytest.approx([1.0 + GAMMA * 3.0, 0.0, 0.0])]


def test_a_new_trajectory_begins_where_the_number_changes_even_if_nothing_was_done():
    mask = torch.ones(1, 4, dtype=torch.bool)
    done = torch.zeros(1, 4, dtype=torch.bool)
    traj_ids = torch.tensor([[7, 7, 8, 8]])
    assert continues(done, traj_ids, mask).tolist() == [[True, False, True, False]]


def test_a_frame_that_is_only_a_reset_is_passed_over():
    row = steps([1.0, 77.0, 2.0], [0.5, 88.0, 0.25], [3.0, 99.0, 4.0], breaks=(0,))
    mask = torch.tensor([[True, False, True]])
    goes_on = continues(torch.tensor([[True, False, False]]), torch.tensor([[0, 1, 1]]), mask)
    row = row._replace(mask=mask, continues=goes_on)
    first, last = 1.0 + GAMMA * 3.0 - 0.5, 2.0 + GAMMA * 4.0 - 0.25
    assert gae(row, gamma=GAMMA, lam=LAM).advantages.tolist() == [pytest.approx([first, 0, last])]


# -- V-trace


def test_vtrace_of_two_steps_with_capped_weights():
    row = steps([1.0, 2.0], [0.5, 0.25], [0.25, 4.0])
    ratio = torch.tensor([[0.5, 3.0]], dtype=torch.float64)
    result = vtrace(row, ratio.log(), gamma=GAMMA, lam=1.0, rho=2.0, c=1.0)
    errors = [1.0 + GAMMA * 0.25 - 0.5, 2.0 + GAMMA * 4.0 - 0.25]
    second = 2.0 * errors[1]  # weight 3, capped at 2
    first = 0.5 * errors[0] + GAMMA * 0.5 * second
    assert result.targets.tolist() == [pytest.approx([0.5 + first, 0.25 + second])]
    # reward plus the discounted target of what followed, less the value
    followed = 1.0 + GAMMA * (0.25 + second) - 0.5
    assert result.advantages.tolist() == [pytest.approx([followed, errors[1]])]


def test_vtrace_passes_nothing_back_through_an_action_that_the_policy_would_not_take():
    row = steps([0.0, 100.0], [0.5, 0.25], [0.25, 4.0])
    log_ratio = torch.tensor([[-1e9, 0.0]], dtype=torch.float64)
    result = vtrace(row, log_ratio, gamma=GAMMA, lam=1.0)
    assert result.targets[0, 0] == 0.5  # what it was thought to be worth


# -- against slow references


@st.composite
def rows(draw: st.DrawFn) -> tuple[Steps, Tensor]:
    """Any rows, with ends, cuts and padding anywhere, and log-ratios."""
    num_rows, num = draw(st.integers(1, 3)), draw(st.integers(1, 19))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (num_rows, num)
    reward, value, final, log_ratio = torch.randn(
        4, *shape, generator=generator, dtype=torch.float64
    )
    chance = torch.rand(3, *shape, generator=generator)
    terminated, truncated = chance[0] < 0.1, chance[1] < 0.1
    traj_ids = (chance[2] < 0.1).cumsum(1)
    lengths = torch.randint(0, num + 1, (num_rows, 1), generator=generator)
    mask = torch.arange(num) < lengths
    goes_on = continues(terminated | truncated, traj_ids, mask)
    next_value = torch.where(goes_on, value.roll(-1, 1), final)
    return Steps(reward, value, next_value, terminated, goes_on, mask), log_ratio


def slow(row: Steps, ratio: Tensor, lam: float, rho: float, c: float) -> Returns:
    """Advantages and targets by a walk from the end of each row to its beginning."""
    advantages, targets = torch.zeros_like(row.reward), torch.zeros_like(row.reward)
    for e, t in reversed([*torch.cartesian_prod(*map(torch.arange, row.mask.shape)).tolist()]):
        if not row.mask[e, t]:
            continue
        follows = 0.0 if row.terminated[e, t] else float(row.next_value[e, t])
        later = 0.0
        if row.continues[e, t]:
            later = float(targets[e, t + 1] - row.value[e, t + 1])
        value, weight = float(row.value[e, t]), float(ratio[e, t])
        error = float(row.reward[e, t]) + GAMMA * follows - value
        advantages[e, t] = error + GAMMA * lam * later
        passed_back = GAMMA * lam * min(c, weight) * later
        targets[e, t] = value + min(rho, weight) * error + passed_back
    return Returns(advantages, targets)


@settings(deadline=None, max_examples=60)
@given(rows(), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_agrees_with_a_walk_through_the_steps(drawn, lam):
    row, log_ratio = drawn
    expected = slow(row, torch.ones_like(log_ratio), lam, 1.0, 1.0)
    torch.testing.assert_close(gae(row, gamma=GAMMA, lam=lam), expected)


@settings(deadline=None, max_examples=60)
@given(rows(), st.sampled_from([0.5, 1.0]), st.sampled_from([0.7, 1.0, 2.0]))
def test_vtrace_agrees_with_a_walk_through_the_steps(drawn, lam, cap):
    row, log_ratio = drawn
    expected = slow(row, log_ratio.exp(), lam, cap, 1.0)
    found = vtrace(row, log_ratio, gamma=GAMMA, lam=lam, rho=cap, c=1.0)
    torch.testing.assert_close(found, expected)


@settings(deadline=None, max_examples=60)
@given(rows(), st.sampled_from([0.0, 0.95, 1.0]))
def test_where_both_policies_agree_vtrace_is_gae(drawn, lam):
    row, log_ratio = drawn
    found = vtrace(row, torch.zeros_like(log_ratio), gamma=GAMMA, lam=lam)
    torch.testing.assert_close(found, gae(row, gamma=GAMMA, lam=lam))


@settings(deadline=None, max_examples=60)
@given(rows())
def test_with_ratio_one_vtrace_targets_are_the_discounted_rewards_and_the_last_value(drawn):
    row, log_ratio = drawn
    targets = vtrace(row, torch.zeros_like(log_ratio), gamma=GAMMA, lam=1.0).targets
    for e, start in row.mask.nonzero().tolist():
        total, weight, t = 0.0, 1.0, start
        while True:
            total, weight = total + weight * float(row.reward[e, t]), weight * GAMMA
            if not row.continues[e, t]:
                break
            t += 1
        if not row.terminated[e, t]:
            total += weight * float(row.next_value[e, t])
        assert float(targets[e, start]) == pytest.approx(total)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31))
def test_discounted_solves_its_recursion_at_any_length(length, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs, decay = torch.rand(2, 3, length, generator=generator, dtype=torch.float64)
    expected, last = torch.zeros_like(inputs), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):
        last = inputs[:, t] + (decay[:, t] * last if t + 1 < length else 0)
        expected[:, t] = last
    torch.testing.assert_close(discounted(inputs, decay), expected)


def test_explained_variance_is_one_for_perfect_values_and_zero_for_constant_ones():
    targets, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(targets, targets, mask) == 1.0
    assert explained_variance(targets, torch.ones(1, 3), mask) == pytest.approx(0.0)
    assert explained_variance(torch.ones(1, 3), targets, mask) == 0.0
    assert explained_variance(targets, targets, ~mask) == 0.0
