"""`model=`: the options of the networks between observation and action."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from harness.options.base import Options
from harness.options.typed import Count

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]


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
class CNNConfig(ModelConfig):
    """Convolutions and fully connected layers, for images of bytes."""

    name: str = "cnn"
    hidden_sizes: list[Count] = field(default_factory=lambda: [512])  # widths, input to output
    activation: Activation = "relu"  # after each convolution and hidden layer


@dataclass
class LSTMConfig(ModelConfig):
    """Fully connected layers and an LSTM, for vectors. PPO and IMPALA only."""

    recurrent: ClassVar[bool] = True

    name: str = "lstm"
    hidden_sizes: list[Count] = field(default_factory=lambda: [64])  # widths, input to output
    lstm_size: Count = 128  # width of the LSTM, which follows the hidden layers
    sequence_length: Count = 16  # frames that one gradient goes back through
