"""The options that only remote collectors have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from collectors.options.check_types import Count, check_fields, is_list
from collectors.options.collector_options import (
    ASYNC,
    SINGLE,
    SYNC,
    Arguments,
    as_device,
    per_worker,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """How many workers there are on other machines, and which of them make a batch together."""

    # None: one for each factory. Each has its own batches if not `sync`
    num_collectors: Count | None = None
    num_workers_per_collector: Count = 1
    sync: bool = True  # all make one batch together, or each its own
    # For TorchRL's users: MultiAsyncCollector if each worker of a collector makes its own batches
    collector_class: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        kind = kind_of(self.collector_class)
        if self.collector_class is not None and kind not in (SINGLE, SYNC, ASYNC):
            name = getattr(self.collector_class, "__name__", type(self.collector_class).__name__)
            raise ValueError(f"collector_class={name}: expected {SINGLE}, {SYNC} or {ASYNC}")
        for name in getattr(self.collector_class, "keywords", ()):
            raise ValueError(f"{name} in collector_class: set it on the outer collector instead")
        if kind == SINGLE and self.num_workers_per_collector > 1:
            raise ValueError(
                f"num_workers_per_collector={self.num_workers_per_collector}: a {SINGLE} has no "
                f"workers; take collector_class={SYNC}"
            )
        if kind == ASYNC and self.sync:
            raise ValueError(f"collector_class={ASYNC} runs ahead, so it needs sync=False")


@dataclass(frozen=True)
class RemoteArguments(Arguments, RemoteOptions):
    """What every remote collector takes."""


def taken(kind: type[T], options: dict[str, Any]) -> T:
    """Take the fields of this dataclass out of all options."""
    names = [field.name for field in fields(kind) if field.name in options]  # type: ignore[arg-type]
    return kind(**{name: options.pop(name) for name in names})


def kind_of(collector_class: Any) -> str | None:
    """Which of the local collectors this makes, also as a partial."""
    while isinstance(collector_class, functools.partial):
        collector_class = collector_class.func
    kind = getattr(collector_class, "kind", None)
    return kind if isinstance(kind, str) else None


def spread(value: Any, num_collectors: int, num_workers: int, name: str) -> list[Any]:
    """One value for each worker, from one for all, or one for each collector or worker."""
    count = num_collectors * num_workers
    if not is_list(value) or (num_workers > 1 and len(value) == count):
        return per_worker(value, count, name)
    if len(value) != num_collectors:
        raise ValueError(
            f"{name} has {len(value)} entries for {num_collectors} collectors of {num_workers} "
            "workers: give one, one for each collector, or one for each worker"
        )
    return [one for entry in value for one in per_worker(entry, num_workers, name)]


def places(device: Any, num_collectors: int, name: str) -> list[torch.device | None]:
    """The policy's device in each collector. Only its machine knows whether it has that."""
    devices = per_worker(device, num_collectors, name, "collectors")
    return [as_device(one, name) for one in devices]
