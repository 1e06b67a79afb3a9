"""Times and sizes of every send: recorded at once, summarised on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

KEPT = 2_000  # how many sends, and answers of each worker, percentiles cover


class Sent(NamedTuple):
    """One published block: the time to pack it, and then to hand it to the channel.

    max_error, relative_error: the error of the wire format (`effects/formats.py`).
    """

    version: int
    nbytes: int
    pack_ns: int
    publish_ns: int
    workers: Sequence[int]
    max_error: float = 0.0
    relative_error: float = 0.0


class Applied(NamedTuple):
    """One version applied by one worker; times count from its publication.

    published_ns: when that was, by the sender's `time.perf_counter_ns()`.
    """

    version: int
    wake_ns: int
    apply_ns: int
    acknowledge_ns: int
    retries: int
    published_ns: int = 0


class WorkerStats:
    """Counts and times of the versions that one worker was sent.

    saved_bytes: how many bytes the wire format saved.
    verified_calls: policy calls that `verify` had checked when it last applied a version.
    """

    def __init__(self) -> None:
        self.addressed = 0
        self.saved_bytes = 0
        self.applied = 0
        self.retries = 0
        self.failures = 0
        self.restarts = 0
        self.verified_calls = 0
        self._recent: deque[Applied] = deque(maxlen=KEPT)

    def add(self, applied: Applied, *, again: bool) -> None:
        """`again`: a new process applied a version that its predecessor had answered."""
        self.applied += not again
        self.retries += applied.retries
        self._recent.append(applied)

    @property
    def recent(self) -> list[Applied]:
        return list(self._recent)

    def since(self, version: int) -> Iterator[Applied]:
        """The answers to later versions, the newest first."""
        for applied in reversed(self.recent):
            if applied.version <= version:
                return
            yield applied

    def summary(self, whole_bytes: int, *, waiting: bool) -> dict[str, Any]:
        recent = self.recent
        return {
            "addressed": self.addressed,
            "bytes": self.addressed * whole_bytes - self.saved_bytes,
            "applied": self.applied,
            "coalesced": max(0, self.addressed - self.applied - self.failures - waiting),
            "retries": self.retries,
            "failures": self.failures,
            "restarts": self.restarts,
            "wake_ms": percentiles([a.wake_ns for a in recent]),
            "apply_ms": percentiles([a.apply_ns for a in recent]),
            "ack_ms": percentiles([a.acknowledge_ns for a in recent]),
        }


class SendStats:
    """All published blocks. `whole_bytes`: the size of a block without a wire format."""

    def __init__(self, whole_bytes: int = 0) -> None:
        self.whole_bytes = whole_bytes
        self.sends = 0
        self.nbytes = 0
        self.max_error = 0.0
        self._recent: deque[Sent] = deque(maxlen=KEPT)

    def add(self, sent: Sent) -> None:
        self.sends += 1
        self.nbytes += sent.nbytes
        self.max_error = max(self.max_error, sent.max_error)
        self._recent.append(sent)

    @property
    def recent(self) -> list[Sent]:
        return list(self._recent)

    @property
    def last(self) -> Sent | None:
        return self._recent[-1] if self._recent else None

    def summary(self) -> dict[str, Any]:
        return {"sends": self.sends, "bytes": self.nbytes, **_sending_times(self.recent)}

    def worker_summaries(self, num_workers: int) -> list[dict[str, Any]]:
        """For each worker, the times of the sends that went to it."""
        sends: list[list[Sent]] = [[] for _ in range(num_workers)]
        for sent in self.recent:
            for worker in sent.workers:
                sends[worker].append(sent)
        return [_sending_times(sent) for sent in sends]

    @property
    def saved_bytes(self) -> int:
        return self.sends * self.whole_bytes - self.nbytes

    def wire_summary(self) -> dict[str, Any]:
        """The bytes that the wire format saved, and its error.

        error: the relative error of the worst tensor, as a mean over the newest publishes.
        max_error: the largest absolute error so far.
        """
        errors = [sent.relative_error for sent in self.recent]
        return {
            "saved_bytes": self.saved_bytes,
            "error": sum(errors) / len(errors) if errors else 0.0,
            "max_error": self.max_error,
        }


def _sending_times(sends: list[Sent]) -> dict[str, Any]:
    return {
        "pack_ms": percentiles([s.pack_ns for s in sends]),
        "publish_ms": percentiles([s.publish_ns for s in sends]),
    }


def percentiles(values_ns: list[int]) -> dict[str, float]:
    """Milliseconds at the usual percentiles (nearest rank); empty without values."""
    if not values_ns:
        return {}
    ranked = sorted(values_ns)
    last = len(ranked) - 1
    points = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: ranked[round(share * last)] / 1e6 for name, share in points.items()}
