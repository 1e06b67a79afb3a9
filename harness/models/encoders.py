"""Encoders of observations, which `model=` chooses from, and the layers they share with heads."""

from __future__ import annotations

import math

import torch
from gymnasium.spaces import Box, Space
from torch import Tensor, nn

from harness.options.models import LSTMConfig, ModelConfig
from harness.registry import models

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def mlp(num_inputs: int, hidden_sizes: list[int], activation: str) -> nn.Sequential:
    """Linear layers, each followed by an activation."""
    layers: list[nn.Module] = []
    for width in hidden_sizes:
        layers += [nn.Linear(num_inputs, width), ACTIVATIONS[activation]()]
        num_inputs = width
    return nn.Sequential(*layers)


def flat(value: Tensor, num_dims: int) -> Tensor:
    """The last so many dimensions as one; a number alone is a vector of one."""
    if num_dims == 1:
        return value
    return value.flatten(-num_dims) if num_dims else value.unsqueeze(-1)


def unflat(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Vectors in the shape that `flat` took from them."""
    return value.unflatten(-1, shape) if shape else value.squeeze(-1)


def orthogonal(module: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Make every weight matrix below `module` orthogonal times `gain`, every bias zero."""
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            nn.init.orthogonal_(parameter, gain)
    return module


class Encoder(nn.Module):
    """The network from an observation to the features that heads are put on."""

    reads_images = False  # whether it takes observations as they are, not as vectors of floats
    num_features: int


class RecurrentEncoder(Encoder):
    """An encoder that carries a state, one tensor, from step to step."""

    def initial_state(self, *batch: int) -> Tensor:
        """The state that an episode starts with."""
        raise NotImplementedError

    def unroll(self, observation: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Many steps [N, L, ...]: the features, and the state *after* each step.

        starts: where an episode begins, so that the state before is forgotten.
        """
        raise NotImplementedError


def encoder(config: ModelConfig, space: Space) -> Encoder:
    """The encoder that a config names; ValueError if it cannot read the observations."""
    made: Encoder = models.get(config.name).load()(config, space)
    return made


def check_observations(config: ModelConfig, space: Space, *, images: bool) -> tuple[int, ...]:
    """The observations' shape; ValueError unless they are images of bytes, or vectors."""
    if not isinstance(space, Box):
        raise ValueError(
            f"model={config.name} reads arrays of numbers, and the observations are a "
            f"{type(space).__name__}; add env.wrappers=[flatten_observation]"
        )
    is_image = space.dtype == "uint8" and len(space.shape) == 3
    if images and not is_image:
        raise ValueError(
            f"model={config.name} reads images of bytes, and the observations are {space.dtype} of "
            f"shape {space.shape}; use model=mlp"
        )
    if is_image and not images:
        raise ValueError(
            f"model={config.name} reads vectors, and the observations are images of shape "
            f"{space.shape}; use model=cnn"
        )
    return space.shape


class MLPEncoder(Encoder):
    """Hidden layers over a vector."""

    def __init__(self, config: ModelConfig, space: Space):
        super().__init__()
        num_inputs = math.prod(check_observations(config, space, images=False))
        self.layers = mlp(num_inputs, config.hidden_sizes, config.activation)
        self.num_features = config.hidden_sizes[-1] if config.hidden_sizes else num_inputs
        orthogonal(self)

    def forward(self, observation: Tensor) -> Tensor:
        return self.layers(observation)


class CNNEncoder(Encoder):
    """Three convolutions over an image of bytes, channels first or last, then hidden layers."""

    reads_images = True

    def __init__(self, config: ModelConfig, space: Space):
        super().__init__()
        shape = check_observations(config, space, images=True)
        self.channels_last = shape[2] < shape[0]
        if self.channels_last:
            shape = (shape[2], *shape[:2])
        act = ACTIVATIONS[config.activation]
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(shape[0], 32, 8, stride=4), act()),
            *(nn.Conv2d(32, 64, 4, stride=2), act()),
            *(nn.Conv2d(64, 64, 3), act(), nn.Flatten()),
        )
        if min(shape[1:]) < 36:
            raise ValueError(
                f"model=cnn needs images of 36 by 36 or more, got {shape[1:]}; enlarge them with "
                "env.wrappers=[{resize: {shape: [84, 84]}}]"
            )
        with torch.no_grad():
            size = self.convolutions(torch.zeros(1, *shape)).shape[1]
        self.layers = mlp(size, config.hidden_sizes, config.activation)
        self.num_features = config.hidden_sizes[-1] if config.hidden_sizes else size
        orthogonal(self)

    def forward(self, observation: Tensor) -> Tensor:
        image = observation.movedim(-1, -3) if self.channels_last else observation
        return self.layers(self.convolutions(image / 255.0))


class LSTMEncoder(RecurrentEncoder):
    """Hidden layers over a vector, then an LSTM. Its state is one tensor: hidden beside cell."""

    def __init__(self, config: LSTMConfig, space: Space):
        super().__init__()
        num_inputs = math.prod(check_observations(config, space, images=False))
        self.layers = mlp(num_inputs, config.hidden_sizes, config.activation)
        width = config.hidden_sizes[-1] if config.hidden_sizes else num_inputs
        self.cell = nn.LSTMCell(width, config.lstm_size)
        self.num_features = config.lstm_size
        orthogonal(self.layers)
        orthogonal(self.cell, gain=1.0)

    def initial_state(self, *batch: int) -> Tensor:
        return self.cell.weight_hh.new_zeros(*batch, 2 * self.num_features)

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step: the features [N, ...] and the state after it."""
        hidden, cell = self.cell(self.layers(observation), state.chunk(2, dim=-1))
        return hidden, torch.cat([hidden, cell], dim=-1)

    def unroll(self, observation: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.layers(observation).unbind(1)
        keep = (~starts).to(state.dtype).unsqueeze(-1).unbind(1)
        hidden, cell = state.chunk(2, dim=-1)
        after = []
        for vector, kept in zip(inputs, keep, strict=True):
            hidden, cell = self.cell(vector, (hidden * kept, cell * kept))
            after.append(torch.cat([hidden, cell], dim=-1))
        states = torch.stack(after, dim=1)
        return states[..., : self.num_features], states
