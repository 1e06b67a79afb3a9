"""Turns: whose batches the learner takes next, and when workers begin others.

    Together       all workers make one batch, which starts when it is requested
    FirstFinished  each worker runs ahead; the first to finish is the next

A pool is a `WorkerPool`, or that of a simulation. Turns use its `handles`, `arrived` (a worker for
each finished batch, in the order in which they came), `version`, `order`, `wait`, `look`, `attend`
(replaces workers that have failed, or raises), `failed` and `versions_under_way`; and of a worker
`serial`, `owed`, `under_way` and `finished`, whose entries have the `version` that was the newest
when they were ordered.
"""

from __future__ import annotations

import math
from typing import Any


class Together:
    """Each batch has frames of all workers.

    share: as soon as this share of the workers has finished, the others hand over what they have.
    """

    def __init__(self, pool: Any, share: float | None = None):
        self._pool = pool
        self._share = share

    def start(self) -> None:
        """Workers begin when a batch is requested."""

    def next(self) -> list[Any]:
        """All workers, each with a finished batch."""
        pool = self._pool
        if self._share is not None:
            self._wait_for(math.ceil(self._share * len(pool.handles)))
            for handle in pool.handles:
                if not handle.finished:
                    pool.cut(handle)
        self._wait_for(len(pool.handles))
        return list(pool.handles)

    def taken(self) -> None:
        """The batches were taken; no other is begun before the next request."""

    def _wait_for(self, count: int) -> None:
        """Wait until so many workers have finished a batch."""
        pool = self._pool

        def has_enough() -> bool:
            return sum(bool(handle.finished) for handle in pool.handles) >= count

        def idle() -> list[Any]:  # at first, and after a replacement
            return [h for h in pool.handles if not h.finished and not h.owed]

        while not has_enough() or pool.failed():
            pool.attend()
            for handle in idle():
                pool.order(handle)
            pool.wait(lambda: bool(has_enough() or pool.failed() or idle()))


class FirstFinished:
    """Each batch has frames of one worker.

    batches_ahead: how many a worker may finish before the learner takes one.
    max_lag: how many versions old a batch may be when it is taken, if one version is published for
        each batch. None for any number.
    """

    def __init__(self, pool: Any, batches_ahead: int, max_lag: int | None):
        self._pool = pool
        self._batches_ahead = batches_ahead
        self._max_lag = max_lag

    def start(self) -> None:
        """Have workers begin."""
        self._order()

    def next(self) -> list[Any]:
        """The worker whose batch comes next."""
        pool = self._pool
        pool.look()  # workers may deliver so fast that no call ever waits
        while True:
            pool.attend()
            self._order()
            if handle := self._first():
                return [handle]
            pool.wait(lambda: bool(self._first() or pool.failed()))

    def taken(self) -> None:
        """The batch was taken; a version will be published for it."""
        if not self._pool.failed():
            self._order(updates=1)

    def _order(self, updates: int = 0) -> None:
        """Order what workers may begin now.

        updates: how many versions will be published before the next batch is taken.
        """
        pool = self._pool
        for count in range(self._batches_ahead):
            able = [handle for handle in pool.handles if handle.under_way <= count]
            for handle in sorted(able, key=lambda handle: handle.serial):
                # It is taken after those under way, each of which may bring a version.
                if self._max_lag is not None:
                    wait = len(pool.versions_under_way()) + updates
                    if wait > self._max_lag:
                        return
                pool.order(handle)

    def _first(self) -> Any:
        """The first to arrive that makes no other batch too old, or None."""
        pool = self._pool
        if self._max_lag is None:
            return next(iter(pool.arrived), None)
        under_way, newest = pool.versions_under_way(), pool.version
        for handle in list(pool.arrived):
            left = under_way.copy()
            left.remove(handle.finished[0].version)
            if all(newest + 1 + i - version <= self._max_lag for i, version in enumerate(left)):
                return handle
            if handle.finished[0].version == under_way[0]:  # several versions came in between
                return handle
        return None
