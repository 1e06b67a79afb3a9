"""`algo.objective={name: {...}}`: the options of PPO's objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from harness.options.typed import NonNegative, Positive, Range


@dataclass
class DecoupledConfig:
    """Clipped against the proximal policy, weighted by its ratio to the weights that acted."""

    weight_cap: Positive = 5.0  # the largest weight of a frame
    # frames above the cap: weight them by the cap, or (mask) not at all
    above_cap: Literal["truncate", "mask"] = "truncate"


@dataclass
class EWMAConfig(DecoupledConfig):
    """Decoupled, and the proximal policy is a moving average of the learner's weights."""

    # of a weight in the average with each gradient step; 8/9 averages over about 9 steps
    proximal_decay: Annotated[float, Range(0, 1)] = 0.889


@dataclass
class DualClipConfig:
    """Clipped against the acting weights, and ratios of bad actions are bounded above, too."""

    # a ratio counts as at most this where the advantage is negative
    ratio_cap: Annotated[float, Range(1, above=True)] = 3.0


@dataclass
class VTraceConfig:
    """The policy gradient of V-trace's actor-critic, for algo.vtrace=true."""

    rho: Positive = 1.0  # cap on the importance weight of a frame's gradient


@dataclass
class TruncatedISConfig:
    """Truncated importance sampling, without clipping."""

    weight_cap: Positive = 2.0  # a frame above it has no gradient


@dataclass
class CISPOConfig:
    """A policy gradient with clipped importance weights, so that every frame keeps its gradient."""

    low: NonNegative = 1.0  # weights are 1 - low or more; 1: not bounded below
    high: NonNegative = 4.0  # weights are 1 + high or less


@dataclass
class M2POConfig:
    """Importance sampling, masked until the second moment of the log-ratios is small."""

    limit: Positive = 0.04  # on the mean square of the log-ratios that are not masked
