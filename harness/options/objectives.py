"""`algo.objective={name: {...}}`: the options of PPO's objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from harness.options.typed import NonNegative, Positive, Range, Share


class ObjectiveConfig:
    """What an objective needs. Options that derive from it say so; others need none of it."""

    # minibatches of whole trajectories, each as far as it lies in the batch
    whole_trajectories: ClassVar[bool] = False
    # actions with probabilities and not densities: discrete ones
    needs_probabilities: ClassVar[bool] = False
    # how strongly each frame's log-probability depends on the features of the policy
    needs_scores: ClassVar[bool] = False


@dataclass
class DecoupledConfig:
    """Clipped against the proximal policy, weighted by its ratio to the weights that acted."""

    weight_cap: Positive = 5.0  # the largest weight of a frame
    # frames above the cap: weight them by the cap, or (mask) not at all
    above_cap: Literal["truncate", "mask"] = "truncate"
    weight_floor: NonNegative = 0.0  # frames with a smaller weight have none (IcePop)


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


@dataclass
class DPPOConfig(ObjectiveConfig):
    """A policy gradient without frames whose probability has moved too far, by a divergence."""

    needs_probabilities: ClassVar[bool] = True

    # total variation, or Kullback-Leibler, of "this action or another one"
    divergence: Literal["tv", "kl"] = "tv"
    limit: Positive = 0.2  # on the divergence; the paper takes 0.05 for kl
    weight_cap: Positive = 20.0  # the largest importance weight of a frame


@dataclass
class SAPOConfig:
    """The ratio passes a smooth gate in place of a clip."""

    temperature: Positive = 1.0  # of the gate where the advantage is positive
    negative_temperature: Positive = 1.05  # and where it is negative: a larger one closes sooner


@dataclass
class VCPOConfig(ObjectiveConfig):
    """A policy gradient with a baseline of least variance, and smaller steps on unequal weights."""

    needs_scores: ClassVar[bool] = True

    weight_cap: Positive = 8.0  # the largest importance weight of a frame


@dataclass
class VACOConfig:
    """Importance sampling until the total variation reaches a limit; for algo.vtrace=true."""

    limit: Positive = 0.1  # on the total variation, estimated over a minibatch


@dataclass
class GSPOConfig(ObjectiveConfig):
    """Clipped against the acting weights, by one ratio for a trajectory."""

    whole_trajectories: ClassVar[bool] = True


@dataclass
class SequenceISConfig(ObjectiveConfig):
    """A policy gradient weighted by the truncated importance weight of each trajectory."""

    whole_trajectories: ClassVar[bool] = True

    weight_cap: Positive = 2.0  # the largest weight of a trajectory


@dataclass
class GeometricConfig(ObjectiveConfig):
    """Clipped against the acting weights, without trajectories that have drifted too far."""

    whole_trajectories: ClassVar[bool] = True

    # on the geometric mean of a trajectory's ratios; one outside of them is left out
    low: Share = 0.9
    high: Annotated[float, Range(1)] = 1.1


@dataclass
class VESPOConfig(ObjectiveConfig):
    """A policy gradient weighted by a smooth, bounded function of each trajectory's weight W."""

    whole_trajectories: ClassVar[bool] = True

    # the weight of a frame is W^power exp(decay (1 - W))
    power: Positive = 2.0  # where the advantage is positive or zero
    decay: Positive = 3.0
    negative_power: Positive = 3.0  # where the advantage is negative
    negative_decay: Positive = 2.0


@dataclass
class A3POConfig(DecoupledConfig):
    """Decoupled, with a proximal policy that is interpolated by the age of each frame."""
