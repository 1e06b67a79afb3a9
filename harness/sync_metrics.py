"""What synchronisation costs: read off the scheme's transports, window by window and in all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.loggers.base import Histogram
from harness.metrics import percentiles
from sync import NoWeightSyncScheme, WeightSyncScheme

MS = 1e-6  # of a nanosecond


class SyncMeter:
    """Publish, acknowledge and apply times (ms) of one scheme, and the bytes it moved."""

    def __init__(self, scheme: WeightSyncScheme, num_workers: int):
        self._scheme = scheme
        self._workers = range(0 if isinstance(scheme, NoWeightSyncScheme) else num_workers)
        self._seen = dict.fromkeys(self._workers, -1)
        self._publish_ms: list[float] = []
        self._fresh_publish_ms: list[float] = []
        self._version_bytes = 0
        self.num_publishes = 0

    @property
    def num_bytes(self) -> int:
        """Published so far. Every version has the same size, so one look will do."""
        if not self._version_bytes and self._publish_ms:
            stats = self._scheme.stats
            self._version_bytes = stats["bytes"] // max(stats["sends"], 1)
        return self._version_bytes * self.num_publishes

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Time one publish, as long as it holds the learner up."""
        start = time.perf_counter()
        yield
        spent_ms = (time.perf_counter() - start) * 1e3
        self.num_publishes += 1
        self._publish_ms.append(spent_ms)
        self._fresh_publish_ms.append(spent_ms)

    def read(self) -> tuple[dict[str, float], dict[str, Histogram]]:
        """Means, and histograms of the latencies, since the last reading."""
        ack_ms, apply_ms = self._fresh_answers()
        publish_ms, self._fresh_publish_ms = self._fresh_publish_ms, []
        groups = {"publish_ms": publish_ms, "ack_ms": ack_ms, "apply_ms": apply_ms}
        found = {name: values for name, values in groups.items() if values}
        metrics = {f"sync/{name}": sum(values) / len(values) for name, values in found.items()}
        histograms = {f"histogram/{name}": Histogram.of(found[name]) for name in found}
        return metrics, histograms

    def _fresh_answers(self) -> tuple[list[float], list[float]]:
        ack_ms: list[float] = []
        apply_ms: list[float] = []
        if self._workers:
            _ = self._scheme.acknowledged  # takes in the answers that lie ready
        for worker in self._workers:
            recent = self._scheme.create_transport(worker_idx=worker).stats.recent
            newest = self._seen[worker]
            for applied in reversed(recent):
                if applied.version <= newest:
                    break
                ack_ms.append(applied.acknowledge_ns * MS)
                apply_ms.append(applied.apply_ns * MS)
                self._seen[worker] = max(self._seen[worker], applied.version)
        return ack_ms, apply_ms

    def summary(self) -> dict[str, Any]:
        """Percentiles over the run (of each worker's newest few thousand answers)."""
        ack_ms, apply_ms = [], []
        workers = {}
        stats = self._scheme.stats
        acknowledged = self._scheme.acknowledged if self._workers else {}
        for worker in self._workers:
            transport = self._scheme.create_transport(worker_idx=worker)
            ack_ms += [applied.acknowledge_ns * MS for applied in transport.stats.recent]
            apply_ms += [applied.apply_ns * MS for applied in transport.stats.recent]
            workers[str(worker)] = {
                "published": transport.addressed,
                "acknowledged": acknowledged[worker],
                **stats["workers"][worker],
            }
        return {
            **percentiles(self._publish_ms, "sync/publish_ms"),
            **percentiles(ack_ms, "sync/ack_ms"),
            **percentiles(apply_ms, "sync/apply_ms"),
            "sync/bytes": stats["bytes"],
            "sync/sends": stats["sends"],
            "workers": workers,
        }
