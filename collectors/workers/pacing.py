"""Pacing of asynchronous workers: how far they run ahead, and whose batch is taken next."""

from __future__ import annotations

from typing import Any


class Pacing:
    """Orders batches, and chooses among those that arrived.

    pool: a `WorkerPool`, or that of a simulation. Used are its `handles`, `arrived` (a worker for
        each finished batch, in the order in which they came), `version`, `order` and
        `versions_under_way`; and of a worker `serial`, `under_way` and `finished`, whose entries
        have the `version` that was the newest when they were ordered.
    batches_ahead: how many a worker may finish before the learner takes one.
    max_lag: how many versions old a batch may be when it is taken, if one version is published for
        each batch. None for any number.
    """

    def __init__(self, pool: Any, batches_ahead: int, max_lag: int | None):
        self._pool = pool
        self._batches_ahead = batches_ahead
        self._max_lag = max_lag

    def order(self, updates: int = 0) -> None:
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

    def next_to_take(self) -> Any:
        """Whose batch comes next: the first to arrive that makes no other one too old, or None."""
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
