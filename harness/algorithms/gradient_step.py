"""A gradient step: the loss of a part of a batch, its gradient, clipping, and the optimiser.

    step = GradientStep(loss, networks, optimiser, max_norm=0.5, compiled=True)
    metrics = step(part)

Eager, it is autograd and torch's fused kernels. Compiled, all of it is one graph of torch.compile.
What was compiled is kept in CACHE, where later runs of the same shapes find it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from harness.algorithms.state import Optimiser

CACHE = Path.home() / ".cache" / "lockstep" / "torchinductor"  # or $TORCHINDUCTOR_CACHE_DIR

Part = dict[str, Tensor]
Loss = Callable[[Part], tuple[Tensor, Part]]
"""The loss of a part, and what to report of it. "step_scale" in that is a factor on the learning
rate of the step."""


class GradientStep:
    """Moves the parameters of some networks, those of the optimiser, along the gradient of a loss.

    Each shape of a part is compiled for itself, unless `varying` names tensors of it whose first
    dimension varies, all of them in the same way. Then one graph is for parts of `usual` length,
    and one for all others. Which graph computes a part depends on the part alone, so a run that is
    resumed or replayed computes the same bits.
    """

    def __init__(
        self,
        loss: Loss,
        networks: Sequence[nn.Module],
        optimiser: Optimiser,
        *,
        max_norm: float = 0.0,
        compiled: bool = False,
        varying: tuple[str, ...] = (),
        usual: int | None = None,
    ):
        self.loss = _Loss(loss, networks)
        self.optimiser = optimiser
        self.max_norm = max_norm
        self.varying = varying
        self.usual = usual
        self.names = [name for name, _ in self.loss.named_parameters()]
        self.learning_rate = torch.zeros((), device=optimiser.parameters[0].device)
        self.compiled = _compiled(self._as_one_graph) if compiled else None
        self.of_any_length = _compiled(self._as_one_graph) if compiled and varying else None

    def __call__(self, part: Part) -> dict[str, Tensor]:
        """Take the step; what `loss` reports, and the norm of the gradient before clipping."""
        graph = self._graph(part)
        if graph is None:
            return self._eager(part)
        self.learning_rate.fill_(self.optimiser.learning_rate)
        with torch.no_grad():
            metrics: dict[str, Tensor] = graph(part, self.learning_rate)
        return metrics

    def _graph(self, part: Part) -> Callable[..., Any] | None:
        """The compiled function for a part; None: none."""
        if not self.varying:
            return self.compiled
        length = len(part[self.varying[0]])
        if length == self.usual:
            return self.compiled
        if self.compiled is None or length < 2:  # a graph for many rows does not fit one
            return None
        for name in part.keys() & set(self.varying):
            torch._dynamo.mark_dynamic(part[name], 0)
        return self.of_any_length

    def _eager(self, part: Part) -> dict[str, Tensor]:
        loss, metrics = self.loss(part)
        scale = float(metrics.get("step_scale", 1.0))
        norm = self.optimiser.step(loss, self.max_norm, scale)
        return {**metrics, "grad_norm": norm}

    def _as_one_graph(self, part: Part, learning_rate: Tensor) -> dict[str, Tensor]:
        """The same step in plain operations, which torch.compile fuses."""
        parameters = self.optimiser.parameters

        def loss_of(weights: Part) -> tuple[Tensor, Part]:
            loss, metrics = functional_call(self.loss, weights, (part,))
            return loss, {name: value.detach() for name, value in metrics.items()}

        weights = dict(zip(self.names, parameters, strict=True))
        gradients, (_, metrics) = grad_and_value(loss_of, has_aux=True)(weights)
        gradient = torch.cat([gradients[name].flatten() for name in self.names])
        norm = torch.linalg.vector_norm(gradient)
        if self.max_norm:
            gradient = gradient * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale = metrics.get("step_scale", 1.0)
        change = self.optimiser.change(gradient, learning_rate * scale)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part_of_change in zip(parameters, change.split(sizes), strict=True):
            parameter.sub_(part_of_change.view_as(parameter))
        return {**metrics, "grad_norm": norm}


class _Loss(nn.Module):
    """A loss as a module, whose networks `functional_call` can give other weights."""

    def __init__(self, loss: Loss, networks: Sequence[nn.Module]):
        super().__init__()
        self.loss = loss
        self.networks = nn.ModuleList(networks)

    def forward(self, part: Part) -> tuple[Tensor, Part]:
        return self.loss(part)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for the shapes that it is called with, apart from all other steps."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        raise ValueError(
            f"algo.compile=true with torch {torch.__version__}: expected torch 2.13 or newer"
        )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE))
    compiled: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
        function,
        fullgraph=True,
        dynamic=False,
        isolate_recompiles=True,
        options={"guard_filter_fn": _guards},
    )
    return compiled


def _guards(guards: Sequence[Any]) -> list[bool]:
    """What is checked in each call: shapes. Networks, options and code of a step do not change."""
    return [
        guard.guard_type == "SHAPE_ENV"
        or (guard.guard_type == "TENSOR_MATCH" and not isinstance(guard.value, nn.Parameter))
        for guard in guards
    ]
