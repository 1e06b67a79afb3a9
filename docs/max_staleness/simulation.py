"""Virtual time for controllers that poll or block: it passes while they wait."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable


class Simulation:
    """Events at moments; those of one moment run in an order that is drawn by the seed."""

    def __init__(self, seed: int):
        self.now = 0.0
        self._random, self._numbers = random.Random(seed), itertools.count()
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []

    def after(self, delay: float, event: Callable[[], None]) -> None:
        """Let it happen so much later."""
        rank = self._random.random(), next(self._numbers)
        heapq.heappush(self._events, (self.now + delay, *rank, event))

    def sleep(self, delay: float) -> None:
        """Let so much time pass, with all that happens in it."""
        end = self.now + delay
        while self._events and self._events[0][0] <= end:
            self._next()
        self.now = end

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Let time pass until the condition holds, or the time is over."""
        end = self.now + timeout
        while not condition():
            if not self._events or self._events[0][0] > end:
                self.now = end
                return False
            self._next()
        return True

    def _next(self) -> None:
        self.now, _, _, event = heapq.heappop(self._events)
        event()
