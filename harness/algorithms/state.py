"""What the algorithms share: seeded initial weights, optimisers, averages, and what is saved."""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from harness.models.normalise import Normaliser

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
    Steps and moments of all parameters lie one after another, which `change` takes as vectors.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, moments: tuple[str, ...]
    ):
        self.parameters: list[Tensor] = list(parameters)
        self.learning_rate = learning_rate
        sizes = [p.numel() for p in self.parameters]
        vector = torch.cat([p.detach().flatten() for p in self.parameters])
        self.step_vector = vector.new_zeros(len(sizes))
        self.steps = list(self.step_vector.unbind())
        self.vectors = {name: torch.zeros_like(vector) for name in moments}
        self.moments = {
            name: [x.view(p.shape) for x, p in zip(v.split(sizes), self.parameters, strict=True)]
            for name, v in self.vectors.items()
        }

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

    def change(self, gradient: Tensor, learning_rate: Tensor) -> Tensor:
        """What `_follow` subtracts from the parameters, as one vector, in plain operations.

        Moves the steps and moments.
        """
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

    def change(self, gradient: Tensor, learning_rate: Tensor) -> Tensor:
        step = self.step_vector.add_(1)[0]
        mean = self.vectors["mean"].lerp_(gradient, 0.1)
        square = self.vectors["square"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        share_of_mean = -torch.expm1(step * math.log(0.9))  # 1 - 0.9 ** step, to the last digit
        share_of_square = -torch.expm1(step * math.log(0.999))
        root = (square / share_of_square).sqrt() + self.eps
        return learning_rate / share_of_mean * mean / root


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

    def change(self, gradient: Tensor, learning_rate: Tensor) -> Tensor:
        self.step_vector.add_(1)
        square = self.vectors["square"].mul_(self.alpha)
        square.addcmul_(gradient, gradient, value=1 - self.alpha)
        change = gradient / (square.sqrt() + self.eps)
        if self.momentum:
            change = self.vectors["velocity"].mul_(self.momentum).add_(change)
        return learning_rate * change


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


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters and buffers, which later updates leave alone."""
    return {name: value.clone() for name, value in module.state_dict().items()}


# -- checkpoints


class Stateful:
    """Saved as the attributes that STATE names; a leading underscore is no part of the name."""

    STATE: ClassVar[tuple[str, ...]] = ()
    """The attributes that a checkpoint holds: modules, optimisers, tensors, arrays, generators,
    numbers, and dicts and lists of these. An attribute that is None is left out."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of what STATE names, which later updates leave alone."""
        parts = {name.removeprefix("_"): getattr(self, name) for name in self.STATE}
        return {name: saved(part) for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for name in self.STATE:
            part = getattr(self, name)
            if part is not None:
                setattr(self, name, restored(part, state[name.removeprefix("_")]))


def saved(part: Any) -> Any:
    """What a checkpoint holds of a part: copies of its tensors, and numbers."""
    if isinstance(part, dict):
        return {name: saved(value) for name, value in part.items()}
    if isinstance(part, list | tuple | deque):
        return [saved(value) for value in part]
    if isinstance(part, np.ndarray):
        return torch.from_numpy(part.copy())
    if isinstance(part, Normaliser):
        return part.statistics()
    if isinstance(part, nn.Module):
        return weights(part)
    if isinstance(part, Tensor):
        return part.detach().clone()
    if isinstance(part, torch.Generator):
        return part.get_state()
    return part.state_dict() if hasattr(part, "state_dict") else part


def restored(part: Any, state: Any) -> Any:
    """The part as it was when `saved` gave `state`: itself, or what takes its place."""
    if isinstance(part, Counter):  # of whole numbers, which are texts in JSON
        return Counter({int(number): count for number, count in state.items()})
    if isinstance(part, dict):
        return {name: restored(part.get(name), value) for name, value in state.items()}
    if isinstance(part, deque):
        return deque(state, part.maxlen)
    if isinstance(part, np.ndarray):
        return np.array(state.numpy() if isinstance(state, Tensor) else state, part.dtype)
    if isinstance(part, Normaliser):
        part.load_statistics(state)
    elif isinstance(part, Tensor):
        part.data.copy_(state)
    elif isinstance(part, torch.Generator):
        part.set_state(state)
    elif hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    elif isinstance(part, int | float) and not isinstance(state, int | float):
        raise TypeError(f"{state!r} is not a number")
    else:
        return state
    return part
