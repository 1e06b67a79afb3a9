"""What a remote collector can be told besides what every collector can."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from collectors.options import ASYNC, SINGLE, SYNC, check_hosted
from collectors.signatures import Arguments

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Who collects where."""

    num_collectors: int | None = None  # as many as there are factories, or one
    num_workers_per_collector: int = 1  # rollout workers in each of them
    sync: bool = True  # all make one batch together, or each its own
    collector_class: Callable[..., Any] | None = None  # what each is; or a partial of it
    max_collectors: int | None = None  # places for those that are added later

    def __post_init__(self) -> None:
        for name in ("num_collectors", "num_workers_per_collector", "max_collectors"):
            value = getattr(self, name)
            if value is None and name != "num_workers_per_collector":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: it must be a whole number")
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        if not isinstance(self.sync, bool):
            raise TypeError(f"sync={self.sync!r}: it must be True or False")
        kind = kind_of(self.collector_class)
        if self.collector_class is not None and kind not in (SINGLE, SYNC, ASYNC):
            raise ValueError(
                f"collector_class={_name(self.collector_class)}: a host runs a {SINGLE}, a {SYNC} "
                f"or a {ASYNC}"
            )
        check_hosted(self.collector_class)
        if kind == SINGLE and self.num_workers_per_collector > 1:
            raise ValueError(
                f"num_workers_per_collector={self.num_workers_per_collector}: a {SINGLE} has no "
                f"workers; take collector_class={SYNC}"
            )
        if kind == ASYNC and self.sync:
            raise ValueError(
                f"collector_class={ASYNC} hands over frames made before they were asked for, which "
                "sync=True rules out: take sync=False"
            )

    def hosted(self) -> Callable[..., Any]:
        """The collector that each host runs."""
        if self.collector_class is not None:
            return self.collector_class
        from collectors.multi import MultiSyncCollector
        from collectors.single import Collector

        return Collector if self.num_workers_per_collector == 1 else MultiSyncCollector


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


def share(value: Any, num_collectors: int, num_workers: int, name: str) -> Any:
    """One value for each collector, from one for all, one each, or one for each worker."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    if num_workers > 1 and len(value) == num_collectors * num_workers:
        starts = range(0, len(value), num_workers)
        return [list(value[start : start + num_workers]) for start in starts]
    if len(value) != num_collectors:
        raise ValueError(
            f"{name} has {len(value)} entries for {num_collectors} collectors of {num_workers} "
            "workers: give one, one for each collector, or one for each worker"
        )
    return list(value)


def places(device: Any, num_collectors: int, name: str) -> list[torch.device | None]:
    """The policy's device in each collector. Whether it is there, only its host can tell."""
    many = isinstance(device, Sequence) and not isinstance(device, str)
    if many and len(device) != num_collectors:
        raise ValueError(f"{name} has {len(device)} entries for {num_collectors} collectors")
    found = []
    for one in device if many else [device] * num_collectors:
        try:
            found.append(None if one is None else torch.device(one))
        except (RuntimeError, TypeError):
            raise ValueError(
                f"{name}={one!r}: no device of torch, as 'cpu' or 'cuda:0' are"
            ) from None
    return found


def _name(made: Any) -> str:
    return str(getattr(made, "__name__", type(made).__name__))
