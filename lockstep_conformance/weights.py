"""A model whose tensors all hold one number, so that any mixture of versions shows."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn


class NumberedModel(nn.Module):
    """Four parameters and two buffers, of up to `width * width` elements."""

    def __init__(self, width: int, number: float = 0.0):
        super().__init__()
        for index in range(2):
            self.register_parameter(f"weight_{index}", nn.Parameter(torch.empty(width, width)))
            self.register_parameter(f"bias_{index}", nn.Parameter(torch.empty(width)))
        self.register_buffer("scale", torch.empty(width, width))
        self.register_buffer("shift", torch.empty(width))
        self.hold(number)

    @torch.no_grad()
    def hold(self, number: float) -> None:
        """Change every tensor in place, as an optimiser step does."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.fill_(number)

    @torch.no_grad()
    def forward(self) -> tuple[float, float]:
        """One policy call: read each tensor once; the lowest and the highest number in them."""
        pairs = [torch.aminmax(tensor) for tensor in (*self.parameters(), *self.buffers())]
        return min(pair.min.item() for pair in pairs), max(pair.max.item() for pair in pairs)


class CartPolePolicy(nn.Module):
    """The same as a policy for CartPole, for libraries that have collectors and not schemes.

    It acts at random. With each action it puts out what its weights said, and in which process.
    """

    in_keys = ("observation",)
    out_keys = outputs = ("action", "low", "high", "pid")

    def __init__(self, width: int):
        super().__init__()
        self.weights = NumberedModel(width)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        low, high = self.weights()
        batch = observation.shape[:-1]
        action = torch.randint(2, batch)
        pid = torch.full(batch, os.getpid())
        return action, torch.full(batch, low), torch.full(batch, high), pid
