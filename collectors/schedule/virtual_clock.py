"""A virtual clock: events happen in the order of their times, without taking real time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """The events to come; those of one time happen as they were added. `now` is in nanoseconds."""

    def __init__(self) -> None:
        self.now = 0
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._added = 0

    def __call__(self) -> int:
        return self.now

    def at(self, time_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Schedule an event at this time, or now if that is past."""
        self._added += 1
        heapq.heappush(self._events, (max(time_ns, self.now), self._added, action, args))

    def step(self) -> None:
        """Go on to the next event. `LookupError` if none is left."""
        if not self._events:
            raise LookupError("the simulation has no event left: it is deadlocked")
        self.now, _, action, args = heapq.heappop(self._events)
        action(*args)

    def advance(self, duration_ns: int) -> None:
        """Advance the clock, and process all events until then."""
        end = self.now + duration_ns
        while self._events and self._events[0][0] <= end:
            self.step()
        self.now = end
