"""What every send cost: kept as plain tuples when it happens, summed up when somebody asks."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

KEPT = 2_000  # newest sends, and answers of each worker, that percentiles are of


class Sent(NamedTuple):
    """One publish: packing the model, and from there until the workers were told.

    max_error, relative_error: what the wire format did to the numbers (`wire/coder.py`).
    """

    version: int
    nbytes: int
    pack_ns: int
    publish_ns: int
    max_error: float = 0.0
    relative_error: float = 0.0


class Applied(NamedTuple):
    """One version taken into use by one worker, counted from its publication."""

    version: int
    wake_ns: int
    apply_ns: int
    acknowledge_ns: int
    retries: int


class WorkerStats:
    """One worker's side of the sends that were addressed to it."""

    def __init__(self) -> None:
        self.addressed = 0
        self.applied = 0
        self.retries = 0
        self.failures = 0
        self.restarts = 0
        self.recent: deque[Applied] = deque(maxlen=KEPT)

    def add(self, applied: Applied, *, again: bool) -> None:
        """`again`: a newcomer took a version that its predecessor had answered."""
        self.applied += not again
        self.retries += applied.retries
        self.recent.append(applied)

    def summary(self, *, waiting: bool) -> dict[str, Any]:
        recent = list(self.recent)  # another thread may be adding to it
        return {
            "addressed": self.addressed,
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
    """The sender's side.

    whole_bytes: what a model takes as it is, whatever the wire format makes of it.
    """

    def __init__(self, whole_bytes: int = 0) -> None:
        self.whole_bytes = whole_bytes
        self.sends = 0
        self.nbytes = 0
        self.max_error = 0.0
        self.recent: deque[Sent] = deque(maxlen=KEPT)

    def add(self, sent: Sent) -> None:
        self.sends += 1
        self.nbytes += sent.nbytes
        self.max_error = max(self.max_error, sent.max_error)
        self.recent.append(sent)

    def summary(self) -> dict[str, Any]:
        recent = list(self.recent)
        return {
            "sends": self.sends,
            "bytes": self.nbytes,
            "pack_ms": percentiles([s.pack_ns for s in recent]),
            "publish_ms": percentiles([s.publish_ns for s in recent]),
        }

    @property
    def saved_bytes(self) -> int:
        return self.sends * self.whole_bytes - self.nbytes

    def wire_summary(self) -> dict[str, Any]:
        """What the wire format saved and cost.

        error: the mean over the newest publishes, relative to the weights; max_error: the largest
        absolute one of all.
        """
        errors = [sent.relative_error for sent in list(self.recent)]
        return {
            "saved_bytes": self.saved_bytes,
            "error": sum(errors) / len(errors) if errors else 0.0,
            "max_error": self.max_error,
        }


def percentiles(values_ns: list[int]) -> dict[str, float]:
    """Milliseconds at the usual percentiles (nearest rank); empty without values."""
    if not values_ns:
        return {}
    ranked = sorted(values_ns)
    last = len(ranked) - 1
    points = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: ranked[round(share * last)] / 1e6 for name, share in points.items()}
