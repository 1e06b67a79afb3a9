"""Turns: which workers' frames the learner takes next, and when workers begin others.

Workers in a group make a batch together. `MultiSyncCollector` has one group of all workers, and
`MultiAsyncCollector` one for each worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from lockstep_check.ages import is_within


class FinishedBatch(Protocol):
    """A batch that is finished. version: the newest when it was ordered."""

    version: int


class TurnWorker(Protocol):
    """What turns need to know of a worker.

    serial: of the last batch that was ordered. cut_serial: of the last one that was cut.
    """

    serial: int
    cut_serial: int

    @property
    def group(self) -> tuple[Any, ...]:
        """The workers that make a batch together."""

    @property
    def under_way(self) -> int:
        """How many batches were ordered and not taken."""

    @property
    def finished(self) -> Sequence[FinishedBatch]:
        """The batches that were not taken, the oldest first."""


W = TypeVar("W", bound=TurnWorker)


class Pool(Protocol[W]):
    """A `WorkerPool`, or that of a simulation."""

    @property
    def handles(self) -> Sequence[W]:
        """The workers that can be given orders."""

    @property
    def arrived(self) -> Iterable[tuple[W, ...]]:
        """A group for each batch that all its workers have finished, as they did."""

    @property
    def version(self) -> int:
        """The version last published."""

    def look(self) -> None:
        """Notice workers that failed, without waiting."""

    def failed(self) -> Sequence[W]:
        """The workers that are to be replaced."""

    def attend(self) -> None:
        """Replace workers that failed, or raise."""

    def order(self, handle: W) -> None:
        """Request one more batch."""

    def cut(self, handle: W) -> None:
        """Have the worker hand over its current batch as it is."""

    def await_batch(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`, or until workers have changed."""

    def versions_under_way(self) -> list[int]:
        """The version at the order of every batch that was not taken yet, the oldest first."""


class Turns(Generic[W]):
    """The next batch is that of the first group to finish one.

    batches_ahead: how many a group may finish before the learner takes one; with 0, a batch is
        begun when it is requested.
    max_lag: how many versions old a batch may be when it is taken, if one version is published for
        each batch. None for any number.
    share: as soon as this share of a group has finished, its others hand over what they have.
    """

    def __init__(
        self,
        pool: Pool[W],
        batches_ahead: int,
        max_lag: int | None = None,
        share: float | None = None,
    ):
        self._pool = pool
        self._batches_ahead = batches_ahead
        self._max_lag = max_lag
        self._share = share

    def start(self) -> None:
        """Have workers begin."""
        self._order(self._batches_ahead)

    def next(self) -> list[W]:
        """The workers whose frames are the next batch."""
        pool = self._pool
        pool.look()  # workers may deliver so fast that no call ever waits
        while True:
            pool.attend()
            self._order(max(1, self._batches_ahead))
            for worker in self._late():
                pool.cut(worker)
            if group := self._first():
                return list(group)
            pool.await_batch(lambda: bool(self._first() or self._late()))

    def taken(self) -> None:
        """The batch was taken; a version will be published for it."""
        if not self._pool.failed():
            self._order(self._batches_ahead, updates=1)

    def _order(self, batches: int, updates: int = 0) -> None:
        """Order what workers may begin now, up to so many batches for each group.

        updates: how many versions will be published before the next batch is taken.
        """
        pool = self._pool
        for count in range(batches):
            able = [worker for worker in pool.handles if worker.under_way <= count]
            able.sort(key=lambda worker: worker.serial)
            for group in dict.fromkeys(worker.group for worker in able):
                idle = [worker for worker in group if worker.under_way <= count]
                # It is taken after those under way, each of which may bring a version.
                if self._max_lag is not None and len(idle) == len(group):
                    wait = len(pool.versions_under_way()) + updates
                    if wait > self._max_lag:
                        return
                for worker in idle:
                    pool.order(worker)

    def _first(self) -> tuple[W, ...] | None:
        """The first group to finish that makes no other batch too old."""
        pool = self._pool
        if self._max_lag is None:
            return next(iter(pool.arrived), None)
        under_way, newest = pool.versions_under_way(), pool.version
        for group in list(pool.arrived):
            version = min(worker.finished[0].version for worker in group)
            left = under_way.copy()
            left.remove(version)
            if all(is_within(one, newest + 1 + i, self._max_lag) for i, one in enumerate(left)):
                return group
            if version == under_way[0]:  # several versions came in between
                return group
        return None

    def _late(self) -> list[W]:
        """The workers that are to hand over what they have, since enough others have finished."""
        if self._share is None:
            return []
        late: list[W] = []
        for group in dict.fromkeys(worker.group for worker in self._pool.handles):
            left = [worker for worker in group if not worker.finished]
            if len(group) - len(left) >= math.ceil(self._share * len(group)):
                late += [worker for worker in left if worker.cut_serial != worker.serial]
        return late
