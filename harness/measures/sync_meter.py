"""What synchronisation costs, from the scheme's statistics: since the last record, and in all."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.measures.clock import percentiles
from harness.measures.meters import Histogram, Readings, Update
from sync import (
    Answer,
    HogwildWeightSyncScheme,
    NoWeightSyncScheme,
    SimulatedWeightSyncScheme,
    WeightSyncScheme,
)
from sync.worker_record import KEPT

MS = 1e-6  # of a nanosecond


class SyncMeter:
    """Publish, acknowledge and apply times (ms) of one scheme, and the bytes it moved."""

    def __init__(self, scheme: WeightSyncScheme, num_workers: int):
        self._scheme = scheme
        # Virtual workers answer when their frames are computed, which is no network's latency.
        silent = isinstance(scheme, NoWeightSyncScheme | SimulatedWeightSyncScheme)
        self._workers = range(0 if silent else num_workers)
        self._applied = dict.fromkeys(self._workers, -1)
        self._publish_ms: deque[float] = deque(maxlen=KEPT)
        self._fresh_publish_ms: list[float] = []
        self._fresh_errors: list[tuple[float, float]] = []  # relative and largest, of each publish
        self._error_sum = self._largest_error = 0.0
        self._num_errors = 0  # that were added up
        self._delays_counted = dict.fromkeys(self._workers, 0)
        self.num_publishes = 0
        self.num_bytes = 0  # as they travel, whatever the wire format
        # By the runs that this one goes on from: bytes, and policy calls.
        self._saved_before = 0
        self._calls_before: dict[str, float] = {}

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Time one publish, as long as it holds the learner up."""
        before = self._scheme.send_stats
        bytes_before, sends_before = before.nbytes, before.sends
        start = time.perf_counter()
        yield
        spent_ms = (time.perf_counter() - start) * 1e3
        stats = self._scheme.send_stats
        self.num_bytes += stats.nbytes - bytes_before
        is_new = stats.sends > sends_before  # nothing may be due yet, with an exact lag
        if is_new and self._scheme.wire != "float32" and (sent := stats.last) is not None:
            self._fresh_errors.append((sent.relative_error, sent.max_error))
            self._error_sum += sent.relative_error
            self._num_errors += 1
            self._largest_error = max(self._largest_error, sent.max_error)
        self.num_publishes += 1
        self._publish_ms.append(spent_ms)
        self._fresh_publish_ms.append(spent_ms)

    def measure(self, update: Update) -> None:
        """Nothing: it measures what is published after an update."""

    def read(self) -> Readings:
        """Means, and histograms of the latencies, since the last reading."""
        ack_ms, apply_ms = self._fresh_answers()
        publish_ms, self._fresh_publish_ms = self._fresh_publish_ms, []
        groups = {"publish_ms": publish_ms, "ack_ms": ack_ms, "apply_ms": apply_ms}
        figures = {name: values for name, values in groups.items() if values}
        metrics = {f"sync/{name}": sum(values) / len(values) for name, values in figures.items()}
        metrics |= self._read_wire() | self._read_link() | self._torn() | self._verified()
        histograms = {f"histogram/{name}": Histogram.of(figures[name]) for name in figures}
        return metrics | histograms

    def _read_wire(self) -> dict[str, float]:
        """What the wire format, if there is one, did to the numbers and saved."""
        errors, self._fresh_errors = self._fresh_errors, []
        if not errors:
            return {}
        return {
            "sync/wire_error": sum(relative for relative, _ in errors) / len(errors),
            "sync/wire_error_max": max(largest for _, largest in errors),
            "sync/bytes_saved": float(self.saved_bytes),
        }

    @property
    def saved_bytes(self) -> int:
        """How much less was sent than versions take as they are."""
        return self._saved_before + self._scheme.send_stats.saved_bytes

    def _read_link(self) -> dict[str, float]:
        """Delays and counts of the emulated links, if there are any."""
        links = self._scheme.links if self._workers else {}
        if not links:
            return {}
        delays_ms: list[float] = []
        counts: Counter[str] = Counter()
        for worker, link in links.items():
            num_delays = min(link.delivered - self._delays_counted[worker], len(link.delays_ns))
            delays_ms += [
                ns * MS for ns in list(link.delays_ns)[len(link.delays_ns) - num_delays :]
            ]
            self._delays_counted[worker] = link.delivered
            counts["in_flight"] += link.num_in_flight
            counts["coalesced"] += link.coalesced
            counts["retransmitted"] += link.retransmitted
        delay = {"sync/link_delay_ms": sum(delays_ms) / len(delays_ms)} if delays_ms else {}
        return delay | {f"sync/link_{name}": float(count) for name, count in counts.items()}

    def _torn(self) -> dict[str, float]:
        """How many policy calls were checked so far, and how many of them had torn weights."""
        if not isinstance(self._scheme, HogwildWeightSyncScheme):
            return {}
        counts = self._scheme.torn
        calls = {"sync/checked_calls": counts["checked"], "sync/torn_calls": counts["torn"]}
        checked, torn = (calls := self._whole(calls)).values()
        return {**calls, "sync/tear_rate": torn / checked if checked else 0.0}

    def _whole(self, calls: dict[str, float]) -> dict[str, float]:
        """Counts of policy calls, with those before this run was resumed."""
        return {name: self._calls_before.get(name, 0) + count for name, count in calls.items()}

    def _verified(self) -> dict[str, float]:
        """How many policy calls were verified, until each worker applied a version last."""
        if self._scheme.verify == "off":
            return {}
        return self._whole({"sync/verified_calls": self._scheme.verified_calls})

    def _fresh_answers(self) -> tuple[list[float], list[float]]:
        answers = self.answers_since(self._applied)
        ack_ms = [applied.acknowledge_ns * MS for _, applied in answers]
        return ack_ms, [applied.apply_ns * MS for _, applied in answers]

    def answers_since(self, newest: dict[int, int]) -> list[tuple[int, Answer]]:
        """Workers' answers to versions later than those in `newest`, which is updated."""
        if self._workers:
            _ = self._scheme.acknowledged  # takes in the answers that lie ready
        answers = []
        for worker in self._workers:
            last = newest.get(worker, -1)
            for applied in self._scheme.worker(worker).since(last):
                answers.append((worker, applied))
                newest[worker] = max(newest.get(worker, -1), applied.version)
        return answers

    def summary(self) -> dict[str, Any]:
        """Percentiles over the run: of the newest 2,000 publishes, and answers of each worker."""
        ack_ms, apply_ms = [], []
        workers = {}
        stats = self._scheme.stats
        acknowledged = self._scheme.acknowledged if self._workers else {}
        for worker in self._workers:
            record = self._scheme.worker(worker)
            recent = record.recent
            ack_ms += [applied.acknowledge_ns * MS for applied in recent]
            apply_ms += [applied.apply_ns * MS for applied in recent]
            workers[str(worker)] = {
                "published": record.addressed,
                "acknowledged": acknowledged[worker],
                **stats["workers"][worker],
            }
        return {
            **percentiles(list(self._publish_ms), "sync/publish_ms"),
            **percentiles(ack_ms, "sync/ack_ms"),
            **percentiles(apply_ms, "sync/apply_ms"),
            "sync/bytes": self.num_bytes,
            "sync/sends": self.num_publishes,
            **self._wire_summary(),
            **self._torn(),
            **self._verified(),
            "workers": workers,
            "moved": stats.get("moved", {}),  # versions and bytes by the mechanism that moved them
        }

    def _wire_summary(self) -> dict[str, float]:
        return {
            "sync/wire_error": self._error_sum / max(1, self._num_errors),
            "sync/wire_error_max": self._largest_error,
            "sync/bytes_saved": self.saved_bytes,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers only, and none of the times."""
        return {
            "publishes": self.num_publishes,
            "bytes": self.num_bytes,
            "saved_bytes": self.saved_bytes,
            "fresh_errors": [list(error) for error in self._fresh_errors],
            "errors": [self._error_sum, self._num_errors, self._largest_error],
            "calls": {**self._torn(), **self._verified()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; what was sent here until now does not count."""
        self.num_publishes = int(state["publishes"])
        self.num_bytes = int(state["bytes"])
        self._saved_before = int(state["saved_bytes"]) - self._scheme.send_stats.saved_bytes
        self._fresh_errors = [(relative, largest) for relative, largest in state["fresh_errors"]]
        if "errors" in state:  # states of earlier versions lack them
            self._error_sum, num_errors, self._largest_error = state["errors"]
            self._num_errors = int(num_errors)
            self._calls_before = dict(state["calls"])
