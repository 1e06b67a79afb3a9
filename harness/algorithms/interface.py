"""What an algorithm is given, and what it has to be.

@algorithms.register("reinforce", options=ReinforceConfig)
class Reinforce:
    def __init__(self, config: ReinforceConfig, setup: Setup): ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from gymnasium.spaces import Space
from tensordict import TensorDictBase
from torch import nn

from harness.options.models import MLPConfig, ModelConfig


@dataclass
class Setup:
    """What the algorithm is made for: the spaces, the model's options, and the run's."""

    observation_space: Space[Any]  # of one environment
    action_space: Space[Any]
    model: ModelConfig = field(default_factory=MLPConfig)
    total_frames: int = 0  # of the whole run
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Algorithm(Protocol):
    """Holds a policy and improves it."""

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

    Its options have batch_size, buffer_size and learning_starts.
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
