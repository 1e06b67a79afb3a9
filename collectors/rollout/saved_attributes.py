"""What a policy keeps beside its parameters and buffers: counters, noise, histories, generators.

It is saved as plain data. What is not plain itself has its kind as the first key:

    0.5    {"list": [0.5, {"tensor": its bytes, "dtype": "float32", ...}]}    {"generator": ...}
"""

from __future__ import annotations

import enum
import hashlib
import random
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

_OF_MODULES = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Values that never change, and parts that are not the policy's own to save.
_LEFT_OUT = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    enum.Enum,
    torch.dtype,
    torch.device,
    nn.Module,
    gym.Env,
    gym.vector.VectorEnv,
)


class SavedAttributes:
    """Saves what has changed in a policy since this object was made."""

    def __init__(self, policy: Any):
        is_module = isinstance(policy, nn.Module)
        self._parts = dict(policy.named_modules()) if is_module else {"": policy}
        self._initial = self._attributes()
        self._buffers_written = False
        self.mark_buffers()

    def mark_buffers(self) -> None:
        """From here on, the policy acts with these weights."""
        self._marks = self._buffer_marks()

    def check_buffers(self) -> None:
        """Note whether it has written to its buffers since they were marked."""
        self._buffers_written |= self._buffer_marks() != self._marks

    def state_dict(self) -> dict[str, Any]:
        """The attributes that have changed, and whether the policy writes to its buffers."""
        initial, now = self._initial, self._attributes()
        changed = {k: v for k, v in now.items() if k not in initial or not equal(v, initial[k])}
        return {"attributes": changed, "buffers_written": self._buffers_written}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Put the saved attributes into an equal policy; what is lost, in words.

        Writes to buffers are always lost: the published weights take their place.
        """
        lost = ["what the policy wrote to its buffers"] if state["buffers_written"] else []
        for path, value in state["attributes"].items():
            part, _, name = path.rpartition(".")
            attributes = self._parts[part].__dict__
            try:
                attributes[name] = restored(attributes.get(name), value)
            except _LostError:
                lost.append(f"the policy's attribute {path.lstrip('.')!r}")
        return lost

    def _attributes(self) -> dict[str, Any]:
        weights = {
            tensor.untyped_storage().data_ptr()
            for part in self._modules()
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        }
        return {
            f"{path}.{name}": saved(value, weights)
            for path, part in self._parts.items()
            for name, value in getattr(part, "__dict__", {}).items()
            if name not in _OF_MODULES
        }

    def _modules(self) -> list[nn.Module]:
        return [part for part in self._parts.values() if isinstance(part, nn.Module)]

    def _buffer_marks(self) -> list[tuple[int, int]]:
        """Each buffer's identity, and how often it was written to."""
        return [
            (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for part in self._modules()
            for buffer in part.buffers(recurse=False)
        ]


class _LostError(Exception):
    """A value cannot be put back."""


def saved(value: Any, weights: Collection[int] = (), seen: set[int] | None = None) -> Any:
    """A value as plain data.

    weights: the addresses of storages that are saved elsewhere. seen: the identities of containers
    and objects that are saved already; these are restored in place, and so wherever they are held.
    """
    if type(value) in _PLAIN:
        return value
    seen = set() if seen is None else seen
    if isinstance(value, _LEFT_OUT) or id(value) in seen:
        return {"left out": None}

    def each(items: Iterable[Any]) -> list[Any]:
        return [saved(item, weights, seen) for item in items]

    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        if value.requires_grad or value.untyped_storage().data_ptr() in weights:
            return {"left out": None}
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        return {"tensor": data, "dtype": dtype, "shape": shape, "device": str(value.device)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        data = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: data, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, GENERATORS):
        return {"generator": saved(_generator_state(value))}
    if isinstance(value, tuple):
        return {"tuple": each(value)}
    seen.add(id(value))
    if isinstance(value, dict):
        return {"dict": [each(pair) for pair in value.items()]}
    if isinstance(value, list | deque):
        return {"list": each(value)}
    if _is_made_of_attributes(value):
        return {"object": [each(pair) for pair in vars(value).items()]}
    return {"opaque": _digest(value)}


def restored(current: Any, saved: Any) -> Any:
    """The saved value. Generators, containers and objects stay the same ones, with its content."""
    if not isinstance(saved, dict):
        return saved
    kind, content = next(iter(saved.items()))
    match kind:
        case "left out" if current is not None:
            return current
        case "tensor":
            flat = content.to(saved["device"], copy=True).view(getattr(torch, saved["dtype"]))
            return flat.reshape(saved["shape"])
        case "array" | "scalar":
            flat = np.frombuffer(content.numpy().tobytes(), np.dtype(saved["dtype"]))
            array = flat.reshape(saved["shape"]).copy()
            return array if kind == "array" else array[()]
        case "generator" if isinstance(current, GENERATORS):
            _set_generator_state(current, restored(None, content))
            return current
        case "dict":
            return _filled_dict(current if isinstance(current, dict) else {}, content)
        case "object" if hasattr(current, "__dict__"):
            _filled_dict(vars(current), content)
            return current
        case "list":
            return _filled_list(current if isinstance(current, list | deque) else [], content)
        case "tuple":
            items = _filled_list(list(current) if isinstance(current, tuple) else [], content)
            return type(current)(*items) if hasattr(current, "_fields") else tuple(items)
    raise _LostError


def _filled_dict(current: dict[Any, Any], pairs: list[Any]) -> dict[Any, Any]:
    items = {}
    for saved_key, saved in pairs:
        key = restored(None, saved_key)
        items[key] = restored(current.get(key), saved)
    current.clear()
    current.update(items)
    return current


def _filled_list(current: Any, saved: list[Any]) -> Any:
    before = [*current, *[None] * len(saved)]
    items = [restored(one, other) for one, other in zip(before, saved, strict=False)]
    current.clear()
    current.extend(items)
    return current


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    is_numpy = isinstance(generator, np.random.RandomState)
    return generator.get_state(legacy=False) if is_numpy else generator.getstate()


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _digest(value: Any) -> str | None:
    """Of a value that cannot be saved, what shows that it has changed; None if nothing does."""
    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    except Exception:  # noqa: BLE001 - whatever it raises, it cannot be compared
        return None


def equal(one: Any, other: Any) -> bool:
    """Whether two saved values are the same. What cannot be compared counts as another."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys() or one.get("opaque", "") is None:
            return False
        return all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _is_made_of_attributes(value: Any) -> bool:
    """Whether it is an object of a plain class, without slots or a base that keeps other data."""
    classes = [vars(kind) for kind in type(value).__mro__[:-1]]
    return hasattr(value, "__dict__") and not any(
        "__slots__" in one or "__reduce__" in one for one in classes
    )
