"""What the algorithms share: seeded initial weights, the optimisers, copies of weights."""

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

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float):
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self._steps = [torch.zeros((), device=p.device) for p in self.parameters]

    def step(self, loss: Tensor, max_norm: float = 0.0) -> Tensor:
        """Follow the gradient of `loss`, clipped to `max_norm` (0: no limit); its norm before."""
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward(inputs=self.parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        norm = get_total_norm(gradients)
        if max_norm:
            clip_grads_with_norm_(self.parameters, max_norm, norm)
        with torch.no_grad():
            self._follow(gradients)
        return norm

    def _follow(self, gradients: list[Tensor]) -> None:
        """Change the parameters."""
        raise NotImplementedError

    def _kinds(self) -> dict[str, list[Tensor]]:
        """The state: lists with a tensor for each parameter, by name."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the step counts and moments; parameters are stored with their modules."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self._state().items():
            tensor.copy_(state[name])

    def _state(self) -> dict[str, Tensor]:
        return {
            f"{kind}.{number}": tensor
            for kind, tensors in self._kinds().items()
            for number, tensor in enumerate(tensors)
        }


class Adam(Optimiser):
    """Adam, by torch's fused kernel."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, *, eps: float = 1e-8
    ):
        super().__init__(parameters, learning_rate)
        self.eps = eps
        self._means = [torch.zeros_like(p) for p in self.parameters]
        self._squares = [torch.zeros_like(p) for p in self.parameters]

    def _follow(self, gradients: list[Tensor]) -> None:
        adam(
            list(self.parameters),
            gradients,
            self._means,
            self._squares,
            [],  # of AMSGrad
            self._steps,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.learning_rate,
            weight_decay=0.0,
            eps=self.eps,
            maximize=False,
        )

    def _kinds(self) -> dict[str, list[Tensor]]:
        return {"step": self._steps, "mean": self._means, "square": self._squares}


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
        super().__init__(parameters, learning_rate)
        self.alpha = alpha
        self.eps = eps
        self.momentum = momentum
        self._squares = [torch.zeros_like(p) for p in self.parameters]
        self._velocities = [torch.zeros_like(p) for p in self.parameters] if momentum else []

    def _follow(self, gradients: list[Tensor]) -> None:
        rmsprop(
            list(self.parameters),
            gradients,
            self._squares,
            [],  # of the centred form
            self._velocities,
            self._steps,
            foreach=True,
            lr=self.learning_rate,
            alpha=self.alpha,
            eps=self.eps,
            weight_decay=0.0,
            momentum=self.momentum,
            centered=False,
        )

    def _kinds(self) -> dict[str, list[Tensor]]:
        return {"step": self._steps, "square": self._squares, "velocity": self._velocities}


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


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters and buffers, which later updates leave alone."""
    return {name: value.clone() for name, value in module.state_dict().items()}
