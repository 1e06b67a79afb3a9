"""What the algorithms share: seeded initial weights, optimisers, and averages of weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from harness.saved_state import weights

Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw initial weights from `seed`, and leave the global random stream where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Optimiser:
    """Moves parameters along the gradient of a loss; derived classes say how far.

    They call the functional forms of torch, such as `torch.optim.adam.adam`: `torch.optim.Adam`
    would import torch._dynamo in its first step, which takes a second.

    Parameters are only changed in place: they may lie in memory that others read, as with hogwild.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, moments: tuple[str, ...]
    ):
        self.parameters: list[Tensor] = list(parameters)
        self.learning_rate = learning_rate
        self.steps = [p.new_zeros(()) for p in self.parameters]
        self.moments = {name: [torch.zeros_like(p) for p in self.parameters] for name in moments}

    def step(self, loss: Tensor, max_norm: float = 0.0, scale: float = 1.0) -> Tensor:
        """Follow the gradient of `loss`, clipped to `max_norm` (0: no limit); its norm before.

        scale: a factor on the learning rate.
        """
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward(inputs=self.parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        norm = get_total_norm(gradients)
        if max_norm:
            clip_grads_with_norm_(self.parameters, max_norm, norm)
        with torch.no_grad():
            self._follow(gradients, scale * self.learning_rate)
        return norm

    def _follow(self, gradients: list[Tensor], learning_rate: float) -> None:
        """Change the parameters, by torch's kernel."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the step counts and moments; parameters are stored with their modules."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self._state().items():
            tensor.copy_(state[name])

    def _state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{number}": tensor
            for name, tensors in {"step": self.steps, **self.moments}.items()
            for number, tensor in enumerate(tensors)
        }


class Adam(Optimiser):
    """Adam: steps along the mean of gradients over the root of their mean square."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, *, eps: float = 1e-8
    ):
        super().__init__(parameters, learning_rate, ("mean", "square"))
        self.eps = eps

    def _follow(self, gradients: list[Tensor], learning_rate: float) -> None:
        adam(
            self.parameters,
            gradients,
            self.moments["mean"],
            self.moments["square"],
            [],  # of AMSGrad
            self.steps,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=learning_rate,
            weight_decay=0.0,
            eps=self.eps,
            maximize=False,
        )


class RMSProp(Optimiser):
    """RMSProp: steps along the gradient over the root of its running mean square."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
    ):
        moments = ("square", "velocity") if momentum else ("square",)
        super().__init__(parameters, learning_rate, moments)
        self.alpha = alpha
        self.eps = eps
        self.momentum = momentum

    def _follow(self, gradients: list[Tensor], learning_rate: float) -> None:
        rmsprop(
            self.parameters,
            gradients,
            self.moments["square"],
            [],  # of the centred form
            self.moments.get("velocity", []),
            self.steps,
            foreach=True,
            lr=learning_rate,
            alpha=self.alpha,
            eps=self.eps,
            weight_decay=0.0,
            momentum=self.momentum,
            centered=False,
        )


class Averaged(Generic[Module]):
    """A copy of a module with the mean of its weights, exponentially weighted over gradient steps.

    The newest weights count 1, those of n steps ago decay ** n; the first are those it is made of.
    """

    def __init__(self, module: Module, decay: float):
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.decay = decay
        self._total = 1.0  # of all that was counted

    @torch.no_grad()
    def follow(self, module: Module) -> None:
        """Take the weights of `module` into the mean."""
        self._total = 1 + self.decay * self._total
        for mean, new in zip(self.module.parameters(), module.parameters(), strict=True):
            mean.lerp_(new, 1 / self._total)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the mean, and what it is a mean of."""
        return {"weights": weights(self.module), "total": self._total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["weights"])
        self._total = float(state["total"])


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, share: float) -> None:
    """Move the weights of `target` to those of `source`: all the way (1), or a little."""
    for old, new in zip(target.parameters(), source.parameters(), strict=True):
        old.lerp_(new, share)
