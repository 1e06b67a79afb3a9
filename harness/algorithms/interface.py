"""The interface of algorithms, and the arguments of their constructors.

@algorithms.register("reinforce", options=ReinforceConfig)
class Reinforce:
    def __init__(self, config: ReinforceConfig, setup: Setup): ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from gymnasium.spaces import Space
from tensordict import TensorDictBase
from torch import Tensor, nn

from harness.options.models import MLPConfig, ModelConfig


@dataclass
class Setup:
    """The spaces, the model's options and the run's options that an algorithm is created for."""

    observation_space: Space[Any]  # of one environment
    action_space: Space[Any]
    model: ModelConfig = field(default_factory=MLPConfig)
    total_frames: int = 0  # of the whole run
    seed: int = 0
    num_workers: int = 1  # in which the policy acts; each tells the policy its `worker_idx`
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Ratios(NamedTuple):
    """How far the policy is from the weights that acted, for each frame [N] of an update."""

    log_ratio: Tensor  # log-probability of the action: by the policy before the update, less theirs
    version: Tensor  # of the weights that acted


def check_annealing(anneals: bool, setup: Setup) -> None:
    """Raise if a learning rate must reach zero at the end of a run without an end."""
    if anneals and setup.total_frames < 1:
        raise ValueError(
            f"algo.anneal_learning_rate is true and total_frames is {setup.total_frames}, "
            "which has no end to anneal to; expected false"
        )


class Algorithm(Protocol):
    """Holds a policy and improves it.

    Optional: an attribute `ratios`, the `Ratios` of the last update, from which `policy/ess`,
    `policy/kl` and `policy/ratio_max` are computed; and a metric `train/gradient_steps`, the number
    of gradient steps in the update, from which `policy/lag_train_mean` is computed. If its options
    have `sampled_frames` above zero, a method `observe(observations)` is called with so many
    observations [N, ...] of random actions, once in a run, before the first version is published.
    """

    policy: Any
    """The module that acts, and is sent to the workers: `in_keys`, `out_keys`, `forward`."""

    def update(self, batch: TensorDictBase, version: int) -> dict[str, float]:
        """Learn from a batch while the newest published weights are of `version`; metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""


class ReplayAlgorithm(Protocol):
    """An algorithm whose options have `replays = True`: it learns from replayed frames.

    Its options have batch_size, buffer_size and learning_starts. Optional: an attribute `replay`,
    the replay buffer to use, if a plain one is not enough. If its options have `sampled_frames`
    above zero, `observe(observations)` is called as with `Algorithm`, and with the observations of
    each new batch before its updates.
    """

    config: Any
    policy: nn.Module

    def updates_due(self, num_frames: int) -> int:
        """How many updates to do now that so many more frames were collected."""

    def update(self, samples: TensorDictBase) -> dict[str, float]:
        """Learn once from replayed frames [N]; metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
