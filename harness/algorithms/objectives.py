"""Objectives of PPO: what a policy update maximises, for fresh data and for data that lags behind.

An objective is a function of the frames, the algorithm's options and its own. It gives the loss and
what to report. Register one of your own by `harness.registry.objectives`.

Written r(p) is a frame's probability ratio, of the policy that is being trained to a policy p: the
behaviour policy (the weights that acted) or the proximal one (the learner at the start of the
update). A is its advantage, and sg(x) is x without gradient. All losses are means over all frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from harness.options.algorithms import PPOConfig
from harness.options.errors import ConfigError
from harness.options.objectives import (
    CISPOConfig,
    DecoupledConfig,
    DualClipConfig,
    EWMAConfig,
    M2POConfig,
    TruncatedISConfig,
    VTraceConfig,
)
from harness.options.typed import build
from harness.parts import choice
from harness.registry import objectives


class Frames(NamedTuple):
    """Of each frame of a minibatch: log-probabilities of its action, and its advantage."""

    log_prob: Tensor  # by the policy that is being trained
    behaviour: Tensor  # by the weights that acted
    # by the learner's weights at the start of the update; by their moving average if the options
    # of the objective have `proximal_decay`
    proximal: Tensor
    advantages: Tensor


Result = tuple[Tensor, dict[str, Tensor]]  # the loss, and what to report


class ObjectiveFunction(Protocol):
    """What is registered as an objective."""

    def __call__(self, frames: Frames, config: PPOConfig, *, options: Any) -> Result: ...


@dataclass(frozen=True)
class Objective:
    """An objective with its options."""

    function: ObjectiveFunction
    options: Any = None

    def __call__(self, frames: Frames, config: PPOConfig) -> Result:
        return self.function(frames, config, options=self.options)

    @property
    def proximal_decay(self) -> float | None:
        """With what decay the proximal policy averages the learner's weights, if it does."""
        decay: float | None = getattr(self.options, "proximal_decay", None)
        return decay


def objective(config: PPOConfig) -> Objective:
    """The objective that a config names."""
    name, arguments = choice(config.objective, "algo.objective")
    part = objectives.get(name)
    if part.options is None:
        if arguments:
            raise ConfigError(f"algo.objective={name} takes no options, got {arguments}")
        return Objective(part.load())
    return Objective(part.load(), build(part.options, arguments, f"algo.objective.{name}"))


# -- clipped


def behaviour(frames: Frames, config: PPOConfig, options: None) -> Result:
    """PPO (Schulman et al. 2017), clipped against the weights that acted, as it was published.

    min(r A, clip(r, 1 - clip, 1 + clip) A) with r = r(behaviour).
    """
    gain, measured = _clipped(frames, frames.behaviour, config.clip)
    return -gain.mean(), measured


def proximal(frames: Frames, config: PPOConfig, options: None) -> Result:
    """PPO (Schulman et al. 2017), clipped against the proximal policy, as if data were fresh.

    min(r A, clip(r, 1 - clip, 1 + clip) A) with r = r(proximal). What acted has no part in it,
    also not with algo.vtrace=true. With V-trace's weight on the gradient it is `decoupled`, whose
    `weight_cap` is then the cap on rho.
    """
    gain, measured = _clipped(frames, frames.proximal, config.clip)
    return -gain.mean(), measured


def decoupled(frames: Frames, config: PPOConfig, options: DecoupledConfig) -> Result:
    """Decoupled PPO (Hilton et al. 2022), its importance weights truncated or masked.

    w min(r A, clip(r, 1 - clip, 1 + clip) A) with r = r(proximal), and w the probability by the
    proximal policy over that by the behaviour policy. A weight above the cap is set to the cap,
    or to zero, as AReaL does (Fu et al. 2025).
    """
    gain, measured = _clipped(frames, frames.proximal, config.clip)
    weights = (frames.proximal - frames.behaviour).exp()
    if options.above_cap == "mask":
        weights = torch.where(weights > options.weight_cap, 0.0, weights)
    else:
        weights = weights.clamp(max=options.weight_cap)
    return -(gain * weights).mean(), measured


def ewma(frames: Frames, config: PPOConfig, options: EWMAConfig) -> Result:
    """PPO-EWMA (Hilton et al. 2022): `decoupled` from a moving average of the learner's weights.

    The proximal policy has the exponentially weighted mean of the weights after each gradient
    step so far, those before the first step included. So the step that clipping allows does not
    depend on how many frames make an update. Their objective has no cap on the weights.
    """
    return decoupled(frames, config, options)


def dual_clip(frames: Frames, config: PPOConfig, options: DualClipConfig) -> Result:
    """Dual-clip PPO (Ye et al. 2020): a bad action's ratio cannot make its loss arbitrarily large.

    `behaviour`; and where A < 0, no less than ratio_cap A.
    """
    gain, measured = _clipped(frames, frames.behaviour, config.clip)
    advantages = frames.advantages
    bounded = torch.max(gain, options.ratio_cap * advantages)
    return -torch.where(advantages < 0, bounded, gain).mean(), measured


# -- weighted: nothing holds the policy near to where it was, so algo.epochs should be small, or
# algo.target_kl set; only `m2po` and `truncated_is` have no gradient beyond their bounds


def vtrace(frames: Frames, config: PPOConfig, options: VTraceConfig) -> Result:
    """The policy gradient of V-trace's actor-critic (IMPALA, Espeholt et al. 2018).

    sg(min(rho, r)) A log p with r = r(behaviour), and p the probability by the policy that is
    being trained. With algo.vtrace=true the advantages are those of V-trace, whose errors and
    traces have caps of their own (algo.vtrace_rho, algo.vtrace_c).
    """
    return _score(frames, 0.0, options.rho)


def cispo(frames: Frames, config: PPOConfig, options: CISPOConfig) -> Result:
    """CISPO (MiniMax-M1, 2025): importance weights are clipped, and no frame loses its gradient.

    sg(clip(r, 1 - low, 1 + high)) A log p with r = r(behaviour), and p the probability by the
    policy that is being trained. The paper tunes `high` alone and does not bound weights below.
    """
    return _score(frames, 1 - options.low, 1 + options.high)


def truncated_is(frames: Frames, config: PPOConfig, options: TruncatedISConfig) -> Result:
    """Truncated importance sampling (Ionides 2008): an estimate of bounded variance, no clipping.

    min(r, weight_cap) A with r = r(behaviour). The estimate itself is differentiated: a frame at
    the cap counts in it and has no gradient. For a gradient with capped weight take `vtrace`.
    """
    log_ratio = frames.log_prob - frames.behaviour
    ratio = log_ratio.exp()
    gain = ratio.clamp(max=options.weight_cap) * frames.advantages
    return -gain.mean(), _measured(log_ratio, ratio, ratio > options.weight_cap)


def m2po(frames: Frames, config: PPOConfig, options: M2POConfig) -> Result:
    """M2PO (Zheng et al. 2025): the second moment of the log-ratios is bounded, not each ratio.

    m r A with r = r(behaviour). As in PPO, only frames can be masked (m = 0) whose gradient moves
    the ratio further from one: A > 0 and r > 1, or A < 0 and r < 1. Of these, those with the
    largest (log r)^2 are masked, as few as bring the mean of it over the others to the limit.
    """
    log_ratio = frames.log_prob - frames.behaviour
    masked = _outliers(log_ratio.detach(), frames.advantages, options.limit)
    ratio = log_ratio.masked_fill(masked, 0.0).exp()  # no infinity, whose gradient would be NaN
    gain = torch.where(masked, 0.0, ratio * frames.advantages)
    return -gain.mean(), _measured(log_ratio, log_ratio.exp(), masked)


# -- what they share


def _clipped(frames: Frames, anchor: Tensor, clip: float) -> Result:
    """Each frame's clipped gain, and how far the policy is from what it is clipped to."""
    log_ratio = frames.log_prob - anchor
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip) * frames.advantages
    measured = _measured(log_ratio, ratio, (ratio - 1).abs() > clip)
    return torch.min(ratio * frames.advantages, clipped), measured


def _score(frames: Frames, low: float, high: float) -> Result:
    """A policy gradient whose frames are weighted by their ratios, held between two bounds."""
    log_ratio = frames.log_prob - frames.behaviour
    ratio = log_ratio.detach().exp()
    weights = ratio.clamp(low, high)
    gain = weights * frames.advantages * frames.log_prob
    return -gain.mean(), _measured(log_ratio, ratio, weights != ratio)


def _outliers(log_ratio: Tensor, advantages: Tensor, limit: float) -> Tensor:
    """The fewest frames without which the mean square of the others' log-ratios is in the limit."""
    leaving = advantages * log_ratio > 0
    squares, order = torch.where(leaving, log_ratio.square(), torch.inf).sort()
    count = torch.arange(1, len(squares) + 1, device=squares.device)
    within = squares.cumsum(0) / count <= limit  # the mean of so many of the smallest
    return leaving & ~torch.zeros_like(leaving).scatter(0, order, within)


@torch.no_grad()
def _measured(log_ratio: Tensor, ratio: Tensor, bounded: Tensor) -> dict[str, Tensor]:
    """The divergence from the policy that ratios are to, and the share of the bounded frames."""
    return {
        "approx_kl": (ratio - 1 - log_ratio).mean(),
        "clip_fraction": bounded.float().mean(),
    }


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """The divergence of a policy from the one before it, by log-ratios of what that one did."""
    return (log_ratio.exp() - 1 - log_ratio).mean()
