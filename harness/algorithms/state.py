"""What the algorithms share about their own state: seeds, and the optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    """Adam in one fused call for all parameters, its memory laid end to end.

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
        self._means, self._squares = self._parts(self._mean), self._parts(self._square)
        self._step = torch.zeros((), device=self._mean.device)  # `steps`, as the call wants it

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def step(self, loss: Tensor) -> None:
        """Follow the gradient of `loss` once."""
        self._follow(torch.autograd.grad(loss, self.parameters))

    @torch.no_grad()
    def clipped_step(self, loss: Tensor, max_norm: float) -> Tensor:
        """The same, with the gradient's norm, which it gives, held to a maximum (0: not)."""
        parts = torch.autograd.grad(loss, self.parameters)
        gradient = torch.cat([part.reshape(-1) for part in parts])
        norm = torch.linalg.vector_norm(gradient)
        if max_norm:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._follow(self._parts(gradient))
        return norm

    @torch.no_grad()
    def _follow(self, gradients: Sequence[Tensor]) -> None:
        self.steps += 1
        self._step.fill_(self.steps)
        torch._fused_adam_(
            self.parameters,
            [gradient.contiguous() for gradient in gradients],
            self._means,
            self._squares,
            [],
            [self._step] * len(self.parameters),
            lr=self.learning_rate,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

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
