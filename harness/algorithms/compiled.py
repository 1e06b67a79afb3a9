"""`algo.compile=true`: gradient steps, each as one graph of torch.compile.

Everything that exists for it is here: `compile_steps` puts a `CompiledStep` in the place of each
step of an algorithm. It computes the loss of a part, its gradient, clipping and the optimiser in
plain operations, which torch.compile fuses. What was compiled is kept in CACHE, where later runs of
the same shapes find it.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from harness.algorithms.actor_critic import ActorCritic
from harness.algorithms.dqn import DQN
from harness.algorithms.impala import IMPALA
from harness.algorithms.interface import Algorithm
from harness.algorithms.optimisers import Adam, Optimiser, RMSProp
from harness.algorithms.ppo import PPO
from harness.algorithms.sac import SAC

CACHE = Path.home() / ".cache" / "lockstep" / "torchinductor"  # or $TORCHINDUCTOR_CACHE_DIR
# What a minibatch of PPO has of each frame, and what a part of IMPALA has of those it learns from.
OF_PPO = (
    "action",
    "inputs",
    "behaviour",
    "proximal",
    "old_value",
    "advantage",
    "target",
    "trajectory",
    "age",
    "counts",
)
OF_IMPALA = ("places", "counts")

Part = dict[str, Tensor]
Loss = Callable[[Part], tuple[Tensor, Part]]
"""The loss of a part, and what to report of it. "step_scale" in that is a factor on the learning
rate of the step."""


def compile_steps(algorithm: Algorithm, model: str) -> None:
    """Compile the gradient steps of an algorithm; `ValueError` if they cannot be."""
    if isinstance(algorithm, ActorCritic) and algorithm.policy.is_recurrent:
        # torch 2.13 gives a wrong gradient for the input weights of an LSTM's cell, silently.
        raise ValueError(
            f"algo.compile=true model={model}: models with memory are not compiled, since that of "
            "an LSTM gets a wrong gradient; expected false"
        )
    match algorithm:
        case PPO():
            size = algorithm.config.minibatch_size
            step = _step_of_actor_critic(algorithm, varying=OF_PPO, usual=size)
            algorithm.step = step  # type: ignore[method-assign]
        case IMPALA():
            of_rows = _step_of_actor_critic(algorithm, varying=OF_IMPALA)

            def of_batch(part: Part) -> Part:
                # How many rows are cut varies: the values of what followed are computed before.
                rest = {key: x for key, x in part.items() if key != "next_inputs"}
                return of_rows(rest | {"ends": algorithm.ends(part)})

            algorithm.step = of_batch  # type: ignore[method-assign]
        case DQN():
            algorithm.step = CompiledStep(  # type: ignore[method-assign]
                algorithm.loss,
                [algorithm.network],
                algorithm.optimiser,
                max_norm=algorithm.config.max_grad_norm,
            )
        case SAC():
            algorithm.critic_step = CompiledStep(  # type: ignore[method-assign]
                algorithm.critic_loss, [algorithm.critics], algorithm.critic_optimiser
            )
            algorithm.policy_step = CompiledStep(  # type: ignore[method-assign]
                algorithm.policy_loss, [algorithm.policy], algorithm.policy_optimiser
            )
        case _:  # of a plugin
            algorithm.compile_steps()


def _step_of_actor_critic(
    algorithm: ActorCritic, *, varying: tuple[str, ...], usual: int | None = None
) -> CompiledStep:
    return CompiledStep(
        algorithm.loss,
        [algorithm.policy, algorithm.critic],
        algorithm.optimiser,
        max_norm=algorithm.config.max_grad_norm,
        varying=varying,
        usual=usual,
    )


class CompiledStep:
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
        self.vectors = Vectors(optimiser)
        self.compiled = _compiled(self._as_one_graph)
        self.of_any_length = _compiled(self._as_one_graph) if varying else None

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
        """The compiled function for a part; None: it is computed eagerly."""
        if not self.varying:
            return self.compiled
        length = len(part[self.varying[0]])
        if length == self.usual:
            return self.compiled
        if length < 2:  # a graph for many rows does not fit one
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
        change = self.vectors.change(gradient, learning_rate * scale)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part_of_change in zip(parameters, change.split(sizes), strict=True):
            parameter.sub_(part_of_change.view_as(parameter))
        return {**metrics, "grad_norm": norm}


class Vectors:
    """Steps and moments of an optimiser as vectors, of which its own tensors become views."""

    def __init__(self, optimiser: Optimiser):
        self.optimiser = optimiser
        sizes = [p.numel() for p in optimiser.parameters]
        self.steps = torch.stack(optimiser.steps)
        optimiser.steps = list(self.steps.unbind())
        self.moments = {}
        for name, moments in optimiser.moments.items():
            vector = self.moments[name] = torch.cat([moment.flatten() for moment in moments])
            parts = zip(vector.split(sizes), optimiser.parameters, strict=True)
            optimiser.moments[name] = [part.view(p.shape) for part, p in parts]

    def change(self, gradient: Tensor, learning_rate: Tensor) -> Tensor:
        """What the optimiser subtracts from its parameters. Moves the steps and moments."""
        optimiser = self.optimiser
        if isinstance(optimiser, Adam):
            return self._of_adam(optimiser, gradient, learning_rate)
        assert isinstance(optimiser, RMSProp)
        return self._of_rmsprop(optimiser, gradient, learning_rate)

    def _of_adam(self, adam: Adam, gradient: Tensor, learning_rate: Tensor) -> Tensor:
        step = self.steps.add_(1)[0]
        mean = self.moments["mean"].lerp_(gradient, 0.1)
        square = self.moments["square"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        share_of_mean = -torch.expm1(step * math.log(0.9))  # 1 - 0.9 ** step, to the last digit
        share_of_square = -torch.expm1(step * math.log(0.999))
        root = (square / share_of_square).sqrt() + adam.eps
        return learning_rate / share_of_mean * mean / root

    def _of_rmsprop(self, rmsprop: RMSProp, gradient: Tensor, learning_rate: Tensor) -> Tensor:
        self.steps.add_(1)
        square = self.moments["square"].mul_(rmsprop.alpha)
        square.addcmul_(gradient, gradient, value=1 - rmsprop.alpha)
        change = gradient / (square.sqrt() + rmsprop.eps)
        if rmsprop.momentum:
            change = self.moments["velocity"].mul_(rmsprop.momentum).add_(change)
        return learning_rate * change


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
