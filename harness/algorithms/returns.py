"""What a frame was worth: generalised advantages and V-trace, over rows of frames [E, T].

A row holds consecutive frames of one environment, and may hold several trajectories, the last of
them unfinished, and frames at its end that no environment produced. `continues` says all of it:
true where the next frame of the row carries on. Where it is false, the value of the true next
observation stands in for what came after; so a truncated episode is bootstrapped like one that the
batch merely cuts, and only a terminated one is worth nothing more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from harness.algorithms.discount import discounted


class Steps(NamedTuple):
    """Rows of frames, and what they are thought to be worth."""

    reward: Tensor
    value: Tensor  # of each frame's observation
    next_value: Tensor  # of the observation that truly followed it
    terminated: Tensor
    continues: Tensor
    mask: Tensor


class Returns(NamedTuple):
    """How much better each action was than expected, and what its observation was worth."""

    advantages: Tensor
    targets: Tensor


def continues(done: Tensor, traj_ids: Tensor, mask: Tensor) -> Tensor:
    """Where the next frame of the row belongs to the same trajectory and is a frame at all."""
    goes_on = torch.zeros_like(mask)
    same = traj_ids[:, 1:] == traj_ids[:, :-1]
    goes_on[:, :-1] = same & ~done[:, :-1] & mask[:, :-1] & mask[:, 1:]
    return goes_on


def gae(steps: Steps, *, gamma: float, lam: float) -> Returns:
    """Generalised advantage estimation; zeros where no frame is."""
    passed_back = gamma * lam * steps.continues.to(steps.value.dtype)
    advantages = discounted(td_errors(steps, gamma), passed_back)
    return Returns(advantages, advantages + torch.where(steps.mask, steps.value, 0))


def vtrace(
    steps: Steps, log_ratio: Tensor, *, gamma: float, lam: float, rho: float = 1.0, c: float = 1.0
) -> Returns:
    """V-trace: returns of the present policy from what another one did.

    log_ratio: the action's log-probability under the present policy, less that under the other.
    rho, c: caps on the weight of a frame's own error, and of the errors passed back through it.

    The advantages do not carry the frame's own weight: the ratio in the objective does. Where
    both policies agree, both results are those of `gae`.
    """
    ratio = torch.where(steps.mask, log_ratio, 0).exp()
    errors = td_errors(steps, gamma)
    passed_back = gamma * lam * steps.continues.to(steps.value.dtype)
    correction = discounted(ratio.clamp(max=rho) * errors, passed_back * ratio.clamp(max=c))
    later = torch.zeros_like(correction)
    later[:, :-1] = correction[:, 1:]
    targets = correction + torch.where(steps.mask, steps.value, 0)
    return Returns(errors + passed_back * later, targets)


def td_errors(steps: Steps, gamma: float) -> Tensor:
    """What each step showed its value to be wrong by; nothing follows a terminated frame."""
    follows = torch.where(steps.terminated | ~steps.mask, 0, steps.next_value)
    return torch.where(steps.mask, steps.reward + gamma * follows - steps.value, 0)


def explained_variance(targets: Tensor, value: Tensor, mask: Tensor) -> float:
    """How much of the targets' spread the values foretold: 1 all, 0 or less nothing."""
    if not mask.any():
        return 0.0
    spread = targets[mask].var(correction=0)
    missed = (targets - value)[mask].var(correction=0)
    return float(1 - missed / spread) if spread > 0 else 0.0
