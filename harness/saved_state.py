"""What a checkpoint holds: `Stateful` objects, saved as the attributes that they name."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from harness.models.normalise import Normaliser


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


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters and buffers, which later updates leave alone."""
    return {name: value.clone() for name, value in module.state_dict().items()}
