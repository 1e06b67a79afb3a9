"""For libraries whose collectors start the workers: each frame says which weights made it.

The collector runs `weights.CartPolePolicy`, whose outputs land in its batches. A subclass makes the
collector, sets `model` and `pids`, and implements `next_frames`, `publish` and `close`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from .protocol import System, Tally

OBSERVE_S = 10.0


class Frame(NamedTuple):
    """One frame: the process that made it, its stamp, and what its weights said."""

    pid: int
    stamp: int | None
    low: float
    high: float


class Collecting(System):
    """A collector and its workers."""

    def __init__(self) -> None:
        self._tallies: dict[int, Tally] = {}

    @abstractmethod
    def next_frames(self) -> Iterable[Frame]:
        """The frames of the next batch, in the order of collection for each worker."""

    def take_turn(self) -> None:
        for frame in self.next_frames():
            tally = self._tallies.setdefault(frame.pid, Tally())
            tally.add(frame.stamp, frame.low, frame.high)

    def observe(self) -> list[Tally]:
        deadline = time.monotonic() + OBSERVE_S
        while True:
            self.take_turn()
            if all(pid in self._tallies for pid in self.pids):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"some workers delivered nothing for {OBSERVE_S:g} s")
        tallies, self._tallies = self._tallies, {}
        return [tallies[pid] for pid in self.pids]
