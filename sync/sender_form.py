"""The forms of `init_on_sender`: which weights are sent, and to which workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from sync.model.strategy import Weights

_FORMS = (
    {"model_id", "context"},
    {"params_map"},
    {"weights", "devices"},
    {"model", "devices"},
    {"weights", "device_map_fn", "num_workers"},
    {"model", "device_map_fn", "num_workers"},
)
_FORMS_IN_WORDS = "; ".join(" + ".join(sorted(form, reverse=True)) for form in _FORMS)


@dataclass(frozen=True)
class SenderForm:
    """The source of weights: one for all workers, one for each, or one mapped for each."""

    devices: tuple[torch.device | None, ...]
    source: Weights | None = None
    by_worker: Mapping[int, Weights] | None = None
    device_map_fn: Callable[[int, Any], Any] | None = None

    @classmethod
    def of(cls, *, model_id: str | None, ctx: Any, **given: Any) -> SenderForm:
        """The form that the arguments of `init_on_sender` describe, or a `ValueError`."""
        arguments = {name for name, value in given.items() if value is not None}
        if "context" in arguments and model_id is not None:
            arguments.add("model_id")
        if arguments not in _FORMS:
            raise ValueError(_clash(arguments))
        if "context" in arguments:
            form = _from_context(given["context"], str(model_id))
        elif "params_map" in arguments:
            form = _from_params_map(given["params_map"])
        else:
            source = given["weights"] if "weights" in arguments else given["model"]
            if "devices" in arguments:
                _check_devices(given["devices"])
                devices = [None if d is None else torch.device(d) for d in given["devices"]]
            else:
                devices = [None] * _whole(given["num_workers"])
            form = cls(tuple(devices), source, device_map_fn=given.get("device_map_fn"))
        if not form.devices:
            raise ValueError("a scheme needs at least one worker, got none")
        form._check_start_method(ctx)
        return form

    @property
    def num_workers(self) -> int:
        return len(self.devices)

    @property
    def same_for_all(self) -> bool:
        return self.by_worker is None and self.device_map_fn is None

    def _check_start_method(self, ctx: Any) -> None:
        if ctx is None or not hasattr(ctx, "get_start_method"):
            return
        if ctx.get_start_method() == "fork" and any(d and d.type == "cuda" for d in self.devices):
            raise ValueError("CUDA workers cannot be forked: use a spawn or forkserver context")


def resolve_model(context: Any, model_id: str) -> Any:
    """The model that `context` knows as `model_id`: by `get_model`, or as a dotted attribute."""
    if callable(getattr(context, "get_model", None)):
        return context.get_model(model_id)
    model = context
    for part in model_id.split("."):
        try:
            model = model[int(part)] if part.isdigit() else getattr(model, part)
        except (AttributeError, IndexError, TypeError, KeyError):
            raise ValueError(
                f"model_id={model_id!r}: {type(context).__name__} has no {part!r} there"
            ) from None
    return model


def _from_context(context: Any, model_id: str) -> SenderForm:
    num_workers = int(getattr(context, "num_workers", 1))
    devices = getattr(context, "policy_device", None)
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        devices = [devices] * num_workers
    if len(devices) != num_workers:
        raise ValueError(f"context has {num_workers} workers but {len(devices)} policy devices")
    placed = tuple(None if d is None else torch.device(d) for d in devices)
    return SenderForm(placed, resolve_model(context, model_id))


def _from_params_map(params_map: Mapping[int, Weights]) -> SenderForm:
    if not isinstance(params_map, Mapping):
        raise ValueError(
            "params_map must be a dict of weights by worker, {0: …, 1: …}; it is a "
            f"{type(params_map).__name__}"
        )
    if set(params_map) != set(range(len(params_map))) or not params_map:
        raise ValueError(
            f"params_map must have one entry for each worker 0, 1, …; it has {list(params_map)}"
        )
    devices = (None,) * len(params_map)
    first = params_map[0]
    if all(weights is first for weights in params_map.values()):
        return SenderForm(devices, first)
    return SenderForm(devices, by_worker=dict(params_map))


def _check_devices(devices: Any) -> None:
    if isinstance(devices, str | torch.device | int):
        one = devices if isinstance(devices, int) else str(devices)
        raise ValueError(
            f"devices={devices!r} is one device; pass one for each worker: "
            f"devices=[{one!r}] for one, devices=[{one!r}] * 4 for four"
        )


def _whole(num_workers: Any) -> int:
    if not isinstance(num_workers, Integral) or isinstance(num_workers, bool):
        raise ValueError(f"num_workers={num_workers!r}: expected a whole number")
    return int(num_workers)


def _clash(arguments: set[str]) -> str:
    shown = " + ".join(sorted(arguments, reverse=True)) or "nothing"
    closest = max(_FORMS, key=lambda form: len(form & arguments) - len(form ^ arguments))
    wrong = [f"{name} is missing" for name in sorted(closest - arguments)]
    wrong += [f"{name} does not go with it" for name in sorted(arguments - closest)]
    nearest = " + ".join(sorted(closest, reverse=True))
    return (
        f"init_on_sender got {shown}; for {nearest}, {', '.join(wrong)}. It takes one of: "
        f"{_FORMS_IN_WORDS}"
    )
