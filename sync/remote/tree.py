"""The tree in which nodes pass versions on, so that the trainer sends few copies.

    trainer ---- 0 ---- 4 ---- 20, 21, 22, 23         (FAN_OUT = 4)
             |      |-- 5 ---- 24, 25, 26, 27
             |      |-- 6 ---- ...
             |      '-- 7
             |-- 1 ---- 8, 9, 10, 11
             |-- 2 ---- ...
             '-- 3

A worker's place follows from its number alone, so that others keep theirs when one leaves. The
trainer draws the tree anew for each version: a worker gets it from the one above if that one gets
the same version now, and is connected with it; otherwise from the trainer. So whoever is lost, or
has not answered yet, passes nothing on, and those below it are served by the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from sync.remote.engine import Engine

_AGAIN_S = 10.0  # after which two nodes that lost each other are connected again
FAN_OUT = 4  # how many a node passes a version on to; up to so many workers, there is no tree


class Branch(NamedTuple):
    """A delivery, and those that its node is to pass on.

    owner: the id of the inbox that it is for.
    serial: the number of the delivery; it stays the same if it is sent again on another way.
    """

    worker: int
    owner: str
    serial: int
    below: list[Branch]

    def all(self) -> Iterator[Branch]:
        """This one and all below it."""
        yield self
        for branch in self.below:
            yield from branch.all()


def above(worker: int) -> int | None:
    """The worker from whose node this one gets versions; None if from the trainer."""
    return worker // FAN_OUT - 1 if worker >= FAN_OUT else None


def below(worker: int) -> range:
    """The workers to which this one's node passes versions on, if there are so many."""
    return range(FAN_OUT * (worker + 1), FAN_OUT * (worker + 2))


class Tree:
    """Which workers are there, and which of them are connected with the one above."""

    def __init__(self) -> None:
        self._there: set[int] = set()
        self._connected: set[int] = set()
        self._connecting: dict[int, list[Future[Any]]] = {}
        self._again_s: dict[int, float] = {}  # when to connect them again

    def join(self, worker: int, engine: Engine) -> None:
        """A process now serves as the worker: give it its place."""
        self.leave(worker)
        self._there.add(worker)
        for one in (worker, *below(worker)):
            self._connect(one, engine)

    def leave(self, worker: int) -> None:
        """The worker left or was lost; those below it are the trainer's to serve."""
        self._there.discard(worker)
        for one in (worker, *below(worker)):
            self._connected.discard(one)
            self._connecting.pop(one, None)
            self._again_s.pop(one, None)

    def cut(self, worker: int) -> None:
        """Nothing comes through from the one above."""
        if worker in self._connected:
            self._connected.discard(worker)
            self._again_s[worker] = time.monotonic() + _AGAIN_S

    def _connect(self, worker: int, engine: Engine) -> None:
        over = above(worker)
        if over in self._there and worker in self._there:
            assert over is not None
            if asked := engine.introduce(over, worker):
                self._connecting[worker] = asked

    def _look(self, engine: Engine) -> None:
        """See which connections have been made since the last look."""
        for worker, asked in list(self._connecting.items()):
            if all(future.done() for future in asked):
                del self._connecting[worker]
                if all(future.exception() is None for future in asked):
                    self._connected.add(worker)
                else:
                    self._again_s[worker] = time.monotonic() + _AGAIN_S
        for worker, at_s in list(self._again_s.items()):
            if time.monotonic() > at_s:
                del self._again_s[worker]
                self._connect(worker, engine)

    def grow(self, branches: Iterable[Branch], engine: Engine) -> list[Branch]:
        """Hang each branch below the one above it; returns those that the trainer sends."""
        self._look(engine)
        found: dict[int | None, Branch] = {branch.worker: branch for branch in branches}
        heads: list[Branch] = []
        for branch in found.values():
            worker = branch.worker
            over = found.get(above(worker)) if worker in self._connected else None
            (heads if over is None else over.below).append(branch)
        return heads
