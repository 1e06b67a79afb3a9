"""Asynchronous workers: how many batches they are ahead, and whose batch the learner takes next."""

from __future__ import annotations

from collections.abc import Sequence

from collectors.workers.handle import WorkerHandle
from collectors.workers.pool import WorkerPool


class Pacing:
    """Orders batches, and chooses among those that arrived.

    batches_ahead: how many a worker may finish before the learner takes one.
    max_lag: how many versions old a batch may be when it is taken, if one version is published for
        each batch. None for any number.
    """

    def __init__(self, pool: WorkerPool, batches_ahead: int, max_lag: int | None):
        self._pool = pool
        self._batches_ahead = batches_ahead
        self._max_lag = max_lag

    def order(self, lent: Sequence[WorkerHandle] = (), updates: int = 0) -> None:
        """Order what workers may begin now.

        lent: whose memory the learner has, once for each block.
        updates: how many versions will be published before the next batch is taken.
        """
        pool = self._pool
        for count in range(self._batches_ahead):
            for handle in sorted(pool.handles, key=lambda handle: handle.serial):
                # It is taken after those under way, each of which may bring a version.
                wait = len(pool.versions_under_way()) + updates
                if self._max_lag is not None and wait > self._max_lag:
                    return
                under_way = handle.owed + len(handle.finished)
                if under_way <= count and under_way + lent.count(handle) < handle.spec.num_blocks:
                    pool.order(handle)

    def next_to_take(self) -> WorkerHandle | None:
        """Whose batch comes next: the first to arrive that makes no other one too old."""
        pool = self._pool
        if self._max_lag is None:
            return pool.arrived[0] if pool.arrived else None
        under_way, newest = pool.versions_under_way(), pool.publisher.version
        for handle in list(pool.arrived):
            left = under_way.copy()
            left.remove(handle.finished[0].version)
            if all(newest + 1 + i - version <= self._max_lag for i, version in enumerate(left)):
                return handle
            if handle.finished[0].version == under_way[0]:  # several versions came in between
                return handle
        return None
