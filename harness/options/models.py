"""`model=`: the options of the networks between observation and action."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from collectors.options.check_types import Count
from harness.options.base import Options

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
Layout = Literal["auto", "first", "last"]


@dataclass
class ModelConfig(Options):
    """Options that every model has."""

    group: ClassVar[str] = "model"
    recurrent: ClassVar[bool] = False  # whether it carries a state from step to step
    own_critic: ClassVar[bool] = False  # whether a critic has an encoder of its own

    name: str = ""  # the registered name
    hidden_sizes: list[Count] = field(default_factory=lambda: [64, 64])  # widths, input to output
    activation: Activation = "tanh"  # after each hidden layer


@dataclass
class MLPConfig(ModelConfig):
    """Fully connected layers, for vectors."""

    own_critic: ClassVar[bool] = True

    name: str = "mlp"


@dataclass
class ImageConfig(ModelConfig):
    """Options of every model for images."""

    activation: Activation = "relu"  # after each convolution and hidden layer
    # where an image has its channels; auto: the side that differs from the two others, or is the
    # shortest; last if all are equal
    channels: Layout = "auto"


@dataclass
class CNNConfig(ImageConfig):
    """The three convolutions of DQN's Nature paper and hidden layers, for images from 36 by 36."""

    name: str = "cnn"
    hidden_sizes: list[Count] = field(default_factory=lambda: [512])  # widths, input to output


@dataclass
class ImpalaCNNConfig(ImageConfig):
    """IMPALA's residual convolutions and hidden layers, for images."""

    name: str = "impala_cnn"
    hidden_sizes: list[Count] = field(default_factory=lambda: [256])  # widths, input to output
    # channels of each stage: a convolution, pooling that halves the image, two residual blocks
    stages: list[Count] = field(default_factory=lambda: [16, 32, 32])


@dataclass
class MinAtarCNNConfig(ImageConfig):
    """One small convolution and hidden layers, for images such as MinAtar's 10 by 10."""

    name: str = "minatar_cnn"
    hidden_sizes: list[Count] = field(default_factory=lambda: [128])  # widths, input to output


@dataclass
class MemoryConfig(ModelConfig):
    """Options of an LSTM that follows the hidden layers.

    Derive from a model's own options and from this, in that order; `own_critic` is false then.
    """

    recurrent: ClassVar[bool] = True
    own_critic: ClassVar[bool] = False

    lstm_size: Count = 128  # width of the LSTM, which follows the hidden layers
    sequence_length: Count = 16  # frames that one gradient goes back through


@dataclass
class LSTMConfig(MemoryConfig):
    """Fully connected layers and an LSTM, for vectors. Not for SAC."""

    name: str = "lstm"
    hidden_sizes: list[Count] = field(default_factory=lambda: [64])  # widths, input to output


@dataclass
class CNNLSTMConfig(CNNConfig, MemoryConfig):
    """The layers of model=cnn and an LSTM. Not for SAC."""

    name: str = "cnn_lstm"


@dataclass
class ImpalaCNNLSTMConfig(ImpalaCNNConfig, MemoryConfig):
    """The layers of model=impala_cnn and an LSTM. Not for SAC."""

    name: str = "impala_cnn_lstm"


@dataclass
class MinAtarCNNLSTMConfig(MinAtarCNNConfig, MemoryConfig):
    """The layers of model=minatar_cnn and an LSTM. Not for SAC."""

    name: str = "minatar_cnn_lstm"


@dataclass
class TransformerConfig(ModelConfig):
    """A small causal transformer with a key-value cache, for texts. Not for SAC."""

    recurrent: ClassVar[bool] = True

    name: str = "transformer"
    hidden_sizes: list[Count] = field(default_factory=lambda: [256, 256])  # one block for each
    width: Count = 64  # of a position
    heads: Count = 4  # of attention
    sequence_length: Count = 16  # frames of one piece of a row that is learned from at once
