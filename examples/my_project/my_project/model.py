"""A model: residual blocks over a vector."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gymnasium.spaces import Space
from torch import Tensor, nn

from harness.models.encoders import Encoder, check_observations, mlp, orthogonal
from harness.options import Count, ModelConfig
from harness.registry import models


@dataclass
class ResidualMLPConfig(ModelConfig):
    """A linear layer and residual blocks of two layers each, for vectors."""

    own_critic = True

    name: str = "residual_mlp"
    width: Count = 64  # of the vector that passes through the blocks
    hidden_sizes: list[Count] = field(default_factory=lambda: [64, 64])  # of each block


@models.register("residual_mlp", options=ResidualMLPConfig)
class ResidualMLPEncoder(Encoder):
    """Each block adds to the vector that it reads."""

    def __init__(self, config: ResidualMLPConfig, space: Space):
        super().__init__()
        num_inputs = math.prod(check_observations(config, space, images=False))
        self.num_features = config.width
        self.inputs = nn.Linear(num_inputs, config.width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *mlp(config.width, [hidden], config.activation), nn.Linear(hidden, config.width)
            )
            for hidden in config.hidden_sizes
        )
        orthogonal(self)

    def forward(self, observation: Tensor) -> Tensor:
        features = self.inputs(observation)
        for block in self.blocks:
            features = features + block(features)
        return features
