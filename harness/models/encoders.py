"""Encoders of observations, which `model=` chooses from, and the layers they share with heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from gymnasium.spaces import Box, Space
from torch import Tensor, nn

from collectors.options.check_types import Count
from harness.options.run import Activation, ModelConfig
from harness.registry import models

Layout = Literal["auto", "first", "last"]
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


@dataclass
class MemoryConfig(ModelConfig):
    """Options of an LSTM that follows the hidden layers.

    Derive from a model's own options and from this, in that order; `own_critic` is false then.
    """

    recurrent: ClassVar[bool] = True
    own_critic: ClassVar[bool] = False

    lstm_size: Count = 128  # width of the LSTM, which follows the hidden layers
    sequence_length: Count = 16  # frames that one gradient goes back through


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
    network: Encoder = models.get(config.name).load()(config, space)
    if isinstance(config, MemoryConfig) and not isinstance(network, RecurrentEncoder):
        return LSTMEncoder(config, network)
    return network


def check_observations(config: ModelConfig, space: Space, *, images: bool) -> tuple[int, ...]:
    """The observations' shape; ValueError unless they are images, or vectors."""
    if not isinstance(space, Box):
        raise ValueError(
            f"model={config.name} reads arrays of numbers, and the observations are a "
            f"{type(space).__name__}; add env.wrappers=[flatten_observation]"
        )
    of_bytes = space.dtype == "uint8" and len(space.shape) in (2, 3)
    if images and not of_bytes and len(space.shape) != 3:
        raise ValueError(
            f"model={config.name} reads images, and the observations are {space.dtype} of "
            f"shape {space.shape}; use model=mlp"
        )
    if of_bytes and not images:
        raise ValueError(
            f"model={config.name} reads vectors, and the observations are images of shape "
            f"{space.shape}; use model=cnn"
        )
    return space.shape


@dataclass
class MLPConfig(ModelConfig):
    """Fully connected layers, for vectors."""

    own_critic: ClassVar[bool] = True

    name: str = "mlp"


@dataclass
class LSTMConfig(MemoryConfig):
    """Fully connected layers and an LSTM, for vectors. Not for SAC."""

    name: str = "lstm"
    hidden_sizes: list[Count] = field(default_factory=lambda: [64])  # widths, input to output


@models.register("lstm", options=LSTMConfig)
@models.register("mlp", options=MLPConfig)
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


@dataclass
class ImageConfig(ModelConfig):
    """Options of every model for images."""

    activation: Activation = "relu"  # after each convolution and hidden layer
    # where an image has its channels; auto: the side that differs from the two others, or is the
    # shortest; last if all are equal
    channels: Layout = "auto"


class ImageEncoder(Encoder):
    """Convolutions over an image, then hidden layers.

    Bytes are scaled to numbers from 0 to 1; other numbers and truth values are taken as they are.
    """

    reads_images = True
    least_side = 1  # that an image may have

    def __init__(self, config: ImageConfig, space: Space):
        super().__init__()
        shape = check_observations(config, space, images=True)
        self.is_flat = len(shape) == 2  # without a dimension for its channels, of which it has one
        self.channels_last = not self.is_flat and channels_are_last(config.channels, shape)
        self.of_bytes = space.dtype == "uint8"
        if self.is_flat:
            shape = (1, *shape)
        elif self.channels_last:
            shape = (shape[2], *shape[:2])
        if min(shape[1:]) < self.least_side:
            raise ValueError(
                f"model={config.name} needs images of {self.least_side} by {self.least_side} or "
                f"more, got {shape[1:]}; use model=minatar_cnn, or enlarge them with "
                "env.wrappers=[{resize: {shape: [84, 84]}}]"
            )
        self.convolutions = self.convolve(config, shape[0])
        with torch.no_grad():
            size = self.convolutions(torch.zeros(1, *shape)).shape[1]
        self.layers = mlp(size, config.hidden_sizes, config.activation)
        self.num_features = config.hidden_sizes[-1] if config.hidden_sizes else size
        orthogonal(self)

    def convolve(self, config: Any, num_channels: int) -> nn.Sequential:
        """From images [N, channels, height, width] to vectors [N, ...]."""
        raise NotImplementedError

    def forward(self, observation: Tensor) -> Tensor:
        image = observation.unsqueeze(-3) if self.is_flat else observation
        image = image.movedim(-1, -3) if self.channels_last else image
        image = image / 255.0 if self.of_bytes else image.float()
        return self.layers(self.convolutions(image))


def channels_are_last(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether images of this shape have their channels last, and not first."""
    if layout != "auto":
        return layout == "last"
    first, middle, last = shape
    if first == middle or middle == last:  # images are often square
        return first == middle
    return last < first


@dataclass
class CNNConfig(ImageConfig):
    """The three convolutions of DQN's Nature paper and hidden layers, for images from 36 by 36."""

    name: str = "cnn"
    hidden_sizes: list[Count] = field(default_factory=lambda: [512])  # widths, input to output


@dataclass
class CNNLSTMConfig(CNNConfig, MemoryConfig):
    """The layers of model=cnn and an LSTM. Not for SAC."""

    name: str = "cnn_lstm"


@models.register("cnn_lstm", options=CNNLSTMConfig)
@models.register("cnn", options=CNNConfig)
class CNNEncoder(ImageEncoder):
    """Three convolutions, those of DQN (Mnih et al., Nature, 2015)."""

    least_side = 36

    def convolve(self, config: CNNConfig, num_channels: int) -> nn.Sequential:
        act = ACTIVATIONS[config.activation]
        return nn.Sequential(
            nn.Conv2d(num_channels, 32, 8, stride=4),
            act(),
            nn.Conv2d(32, 64, 4, stride=2),
            act(),
            nn.Conv2d(64, 64, 3),
            act(),
            nn.Flatten(),
        )


@dataclass
class ImpalaCNNConfig(ImageConfig):
    """IMPALA's residual convolutions and hidden layers, for images."""

    name: str = "impala_cnn"
    hidden_sizes: list[Count] = field(default_factory=lambda: [256])  # widths, input to output
    # channels of each stage: a convolution, pooling that halves the image, two residual blocks
    stages: list[Count] = field(default_factory=lambda: [16, 32, 32])


@dataclass
class ImpalaCNNLSTMConfig(ImpalaCNNConfig, MemoryConfig):
    """The layers of model=impala_cnn and an LSTM. Not for SAC."""

    name: str = "impala_cnn_lstm"


class ResidualBlock(nn.Module):
    """Two convolutions whose output is added to their input."""

    def __init__(self, num_channels: int, act: type[nn.Module]):
        super().__init__()
        self.layers = nn.Sequential(
            act(),
            nn.Conv2d(num_channels, num_channels, 3, padding=1),
            act(),
            nn.Conv2d(num_channels, num_channels, 3, padding=1),
        )

    def forward(self, image: Tensor) -> Tensor:
        return image + self.layers(image)


@models.register("impala_cnn_lstm", options=ImpalaCNNLSTMConfig)
@models.register("impala_cnn", options=ImpalaCNNConfig)
class ImpalaCNNEncoder(ImageEncoder):
    """Residual convolutions, the larger network of the IMPALA paper (Espeholt et al., 2018)."""

    def convolve(self, config: ImpalaCNNConfig, num_channels: int) -> nn.Sequential:
        act = ACTIVATIONS[config.activation]
        layers: list[nn.Module] = []
        for width in config.stages:
            layers += [
                nn.Conv2d(num_channels, width, 3, padding=1),
                nn.MaxPool2d(3, stride=2, padding=1),
                ResidualBlock(width, act),
                ResidualBlock(width, act),
            ]
            num_channels = width
        return nn.Sequential(*layers, act(), nn.Flatten())


@dataclass
class MinAtarCNNConfig(ImageConfig):
    """One small convolution and hidden layers, for images such as MinAtar's 10 by 10."""

    name: str = "minatar_cnn"
    hidden_sizes: list[Count] = field(default_factory=lambda: [128])  # widths, input to output


@dataclass
class MinAtarCNNLSTMConfig(MinAtarCNNConfig, MemoryConfig):
    """The layers of model=minatar_cnn and an LSTM. Not for SAC."""

    name: str = "minatar_cnn_lstm"


@models.register("minatar_cnn_lstm", options=MinAtarCNNLSTMConfig)
@models.register("minatar_cnn", options=MinAtarCNNConfig)
class MinAtarCNNEncoder(ImageEncoder):
    """One convolution of 16 channels, as in the MinAtar paper (Young and Tian, 2019)."""

    least_side = 3

    def convolve(self, config: MinAtarCNNConfig, num_channels: int) -> nn.Sequential:
        act = ACTIVATIONS[config.activation]
        return nn.Sequential(nn.Conv2d(num_channels, 16, 3), act(), nn.Flatten())


class LSTMEncoder(RecurrentEncoder):
    """An LSTM after another encoder. Its state is one tensor: hidden beside cell."""

    def __init__(self, config: MemoryConfig, inner: Encoder):
        super().__init__()
        self.inner = inner
        self.reads_images = inner.reads_images
        self.cell = nn.LSTMCell(inner.num_features, config.lstm_size)
        self.num_features = config.lstm_size
        orthogonal(self.cell, gain=1.0)

    def initial_state(self, *batch: int) -> Tensor:
        return self.cell.weight_hh.new_zeros(*batch, 2 * self.num_features)

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step: the features [N, ...] and the state after it."""
        hidden, cell = self.cell(self.inner(observation), state.chunk(2, dim=-1))
        return hidden, torch.cat([hidden, cell], dim=-1)

    def unroll(self, observation: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        vectors = self.inner(observation.flatten(0, 1)).unflatten(0, starts.shape)
        keep = (~starts).to(state.dtype).unsqueeze(-1).unbind(1)
        hidden, cell = state.chunk(2, dim=-1)
        after = []
        for vector, kept in zip(vectors.unbind(1), keep, strict=True):
            hidden, cell = self.cell(vector, (hidden * kept, cell * kept))
            after.append(torch.cat([hidden, cell], dim=-1))
        states = torch.stack(after, dim=1)
        return states[..., : self.num_features], states
