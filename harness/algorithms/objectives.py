"""Objectives of PPO: what a policy update maximises, for fresh data and for data that lags behind.

An objective is a function of the frames, the algorithm's options and its own. It gives the loss and
what to report. Register one of your own by `harness.registry.objectives`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.options.algorithms import PPOConfig
from harness.options.errors import ConfigError
from harness.options.typed import build
from harness.parts import choice
from harness.registry import objectives


class Frames(NamedTuple):
    """Of each frame of a minibatch: log-probabilities of its action, and its advantage."""

    log_prob: Tensor  # by the policy that is being trained
    behaviour: Tensor  # by the weights that acted
    proximal: Tensor  # by the learner's weights at the start of the update
    advantages: Tensor


Objective = Callable[[Frames, PPOConfig], tuple[Tensor, dict[str, Tensor]]]


def objective(config: PPOConfig) -> Objective:
    """The objective that a config names."""
    name, arguments = choice(config.objective, "algo.objective")
    part = objectives.get(name)
    if part.options is None:
        if arguments:
            raise ConfigError(f"algo.objective={name} takes no options, got {arguments}")
        return partial(part.load(), options=None)
    return partial(part.load(), options=build(part.options, arguments, f"algo.objective.{name}"))


def behaviour(frames: Frames, config: PPOConfig, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped against the recorded probabilities of the weights that acted."""
    gain, measured = _clipped(frames, frames.behaviour, config.clip)
    return -gain.mean(), measured


def proximal(frames: Frames, config: PPOConfig, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped against the learner's weights at the start of the update, as if data were fresh."""
    gain, measured = _clipped(frames, frames.proximal, config.clip)
    return -gain.mean(), measured


def decoupled(frames: Frames, config: PPOConfig, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped against the learner's own, weighted by how far those are from the acting weights."""
    gain, measured = _clipped(frames, frames.proximal, config.clip)
    weights = (frames.proximal - frames.behaviour).exp().clamp(max=config.weight_cap)
    return -(gain * weights).mean(), measured


def _clipped(frames: Frames, anchor: Tensor, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Each frame's clipped gain, and how far the policy is from what it is clipped to."""
    log_ratio = frames.log_prob - anchor
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip) * frames.advantages
    with torch.no_grad():
        measured = {
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clip_fraction": ((ratio - 1).abs() > clip).float().mean(),
        }
    return torch.min(ratio * frames.advantages, clipped), measured
