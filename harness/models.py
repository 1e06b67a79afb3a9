"""Networks: the encoders that `model=` chooses from, and the layers that the algorithms share."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.checks import at_least, one_of

KINDS = ("mlp", "cnn", "lstm")
ACTIVATIONS = ("tanh", "relu", "elu", "gelu", "silu")


@dataclass
class ModelConfig:
    """What the networks between observation and action look like."""

    name: str = "mlp"  # mlp: vectors; cnn: images of bytes; lstm: vectors, with a memory
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])  # widths, input to output
    activation: str = "tanh"  # tanh, relu, elu, gelu or silu, after each hidden layer
    lstm_size: int = 128  # lstm: width of the memory, which follows the hidden layers
    sequence_length: int = 16  # lstm: frames that one gradient goes back through

    def validate(self) -> None:
        """Raise ValueError, in one line, if this describes no network."""
        one_of("model.name", self.name, KINDS)
        one_of("model.activation", self.activation, ACTIVATIONS)
        for width in self.hidden_sizes:
            at_least("model.hidden_sizes", width, 1)
        at_least("model.lstm_size", self.lstm_size, 1)
        at_least("model.sequence_length", self.sequence_length, 1)
