"""What the algorithms share about their own state: seeds, and the optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw initial weights from `seed`, and leave the global random stream where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class FlatAdam:
    """Adam that works on all gradients laid end to end: a step is ten calls, however many they are.

    The parameters stay where they are and are only changed in place: they may be memory that
    someone else has placed (as the hogwild scheme does).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        self.parameters: list[Tensor] = list(parameters)
        self.learning_rate = learning_rate
        self.betas = betas
        self.eps = eps
        self.steps = 0
        self._mean = torch.cat([torch.zeros_like(p.detach()).flatten() for p in self.parameters])
        self._square = torch.zeros_like(self._mean)
        self._change = torch.zeros_like(self._mean)
        parts = self._change.split([p.numel() for p in self.parameters])
        self._changes = [c.view_as(p) for c, p in zip(parts, self.parameters, strict=True)]

    @torch.no_grad()
    def step(self, loss: Tensor, max_grad_norm: float = 0.0) -> Tensor:
        """Follow the gradient of `loss` once; its norm, which may be held to a maximum (0: not)."""
        parts = torch.autograd.grad(loss, self.parameters)
        gradient = torch.cat([part.reshape(-1) for part in parts])
        norm = torch.linalg.vector_norm(gradient)
        if max_grad_norm:
            gradient *= (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        self.steps += 1
        first, second = self.betas
        self._mean.lerp_(gradient, 1 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        spread = self._square.sqrt().div_(math.sqrt(1 - second**self.steps)).add_(self.eps)
        rate = self.learning_rate / (1 - first**self.steps)
        torch.div(self._mean, spread, out=self._change).mul_(-rate)
        torch._foreach_add_(self.parameters, self._changes)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Adam's memory; the parameters themselves are their modules' to store."""
        return {"steps": self.steps, "mean": self._mean.clone(), "square": self._square.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.steps = int(state["steps"])
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters and buffers, which later updates leave alone."""
    return {name: value.clone() for name, value in module.state_dict().items()}
