"""Traces for tests: one that breaks no rule, and a way to plant faults in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
LAG, WORKERS, EPOCHS, LENGTH = 2, 2, 2, 8


def sound(updates: int = 6, first_update: int = 0, first_sample: int = 0) -> list[Event]:
    """Two workers that act two versions behind; each sample has two calls of two versions."""
    events: list[Event] = [{"event": "publish", **_version(first_update)}]
    for update in range(first_update + 1, first_update + updates + 1):
        older = max(first_update, update - 1 - LAG)
        newer = max(first_update, update - LAG)
        sample = first_sample + update - first_update - 1
        places = [{"worker": worker, "sample": sample} for worker in range(WORKERS)]
        for place in places:
            for half, version in enumerate((older, newer)):
                call = {"call": 2 * sample + half, "cache": version}
                act = {**place, **call, "version": version, "length": LENGTH, "logprob": -1.5}
                events.append({"event": "act", **act})
            whole = {"version": older, "length": 2 * LENGTH}
            events.append({"event": "enqueue", **place, **whole, "newest": update - 1})
            events.append({"event": "take", **place, **whole})
        for epoch in range(EPOCHS):
            for place in places:
                train = {"update": update, "epoch": epoch, "step": (update - 1) * EPOCHS + epoch}
                own = {"version": older, "age": update - 1 - older, "logprob": -3.0}
                events.append({"event": "train", **place, **train, **own, "length": 2 * LENGTH})
        events.append({"event": "publish", **_version(update)})
        for worker in range(WORKERS):
            events.append(
                {"event": "applied", "worker": worker, "version": update, "checksum": f"c{update}"}
            )
        made = (update - first_update) * WORKERS * 2 * LENGTH
        counts = {"collected": made, "delivered": made, "dropped": 0, "in_flight": 0}
        if not first_update:
            events.append({"event": "counts", **counts})
    return events


def _version(number: int) -> Event:
    return {"version": number, "update": number, "step": EPOCHS * number, "checksum": f"c{number}"}


def write(path: Path, events: list[Event], end: str = "") -> Path:
    head = {"event": "trace", "format": 1, "program": "a test", "unit": "tokens"}
    lines = [json.dumps(event) for event in [head, *events]]
    path.write_text("".join(f"{line}\n" for line in lines) + end)
    return path


def index(events: list[Event], event: str, **fields: Any) -> int:
    """The place of the first event of this kind with these fields."""
    for place, one in enumerate(events):
        if one["event"] == event and all(one.get(name) == fields[name] for name in fields):
            return place
    raise LookupError(f"no {event} with {fields}")


Plant = Callable[[list[Event]], None]


def change(event: str, where: Event, **values: Any) -> Plant:
    """Change fields of the first event that matches."""

    def plant(events: list[Event]) -> None:
        events[index(events, event, **where)].update(values)

    return plant


def remove(event: str, **where: Any) -> Plant:
    """Leave out the first event that matches."""

    def plant(events: list[Event]) -> None:
        del events[index(events, event, **where)]

    return plant


def move(event: str, where: Event, before: str, there: Event) -> Plant:
    """Move the first event that matches to the place before another one."""

    def plant(events: list[Event]) -> None:
        moved = events.pop(index(events, event, **where))
        events.insert(index(events, before, **there), moved)

    return plant


def insert(event: Event, before: str, **there: Any) -> Plant:
    """Add an event before the first one that matches."""

    def plant(events: list[Event]) -> None:
        events.insert(index(events, before, **there), event)

    return plant


def resume(events: list[Event], dropped: int, *, update: int = 6) -> list[Event]:
    """The events, a resume, and more updates with new samples."""
    return [
        *events,
        {"event": "resume", "update": update, "dropped": dropped},
        *sound(4, first_update=update, first_sample=100),
    ]
