"""What a sender knows of its workers: their versions, their failures, and times and sizes of sends.

Times and sizes are recorded at once, and summarised on request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from sync.channel_interface import APPLIED, FAILED, JOINED, LEFT, Answer
from sync.errors import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from sync.model.block import NEVER, Snapshot

ABSENT, MET, CONNECTED = "absent", "met", "connected"
KEPT = 2_000  # how many sends, and answers of each worker, percentiles cover


class Sent(NamedTuple):
    """One published block: the time to pack it, and then to hand it to the channel.

    max_error, relative_error: the error of the wire format (`effects/rounding.py`).
    """

    version: int
    nbytes: int
    pack_ns: int
    publish_ns: int
    workers: Sequence[int]
    max_error: float = 0.0
    relative_error: float = 0.0


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


class WorkerRecord:
    """The versions that a worker was sent and has acknowledged, its failure, counts and times.

    state: ABSENT until a process serves as the worker, MET until that uses a version, CONNECTED.
    addressed, acknowledged: the version it was sent last, and the newest that it is known to use.
    last: the block of the version it was sent last, for a process that replaces it.
    sends: how many versions it was sent; applied, failures: how many of them it used or refused.
    saved_bytes: how many bytes the wire format saved.
    verified_calls: policy calls that `verify` had checked when it last applied a version.
    """

    def __init__(self, index: int, device: torch.device | None):
        self.index = index
        self.device = device
        self.label = ""
        self.sends = self.applied = self.failures = self.restarts = self.retries = 0
        self.saved_bytes = self.verified_calls = 0
        self._recent: deque[Answer] = deque(maxlen=KEPT)
        self.addressed = self.answered = self.acknowledged = NEVER
        self.state = ABSENT
        self.pid = 0
        self.last: Snapshot | None = None
        self._raised: WorkerError | None = None
        self._dead: WorkerError | None = None
        self._reported = False

    def __str__(self) -> str:
        words = [str(self.device or "cpu"), *([self.label] if self.label else [])]
        return f"worker {self.index} ({', '.join(words)})"

    @property
    def connected(self) -> bool:
        """Whether the process that serves as the worker has used a version."""
        return self.state == CONNECTED

    @property
    def waiting(self) -> bool:
        """Whether it has yet to acknowledge what it was sent last."""
        return self.acknowledged < self.addressed

    @property
    def failure(self) -> WorkerError | None:
        """Its failure. A death is not a failure if it had acknowledged everything."""
        return self._raised or (self._dead if self.waiting or not self.connected else None)

    @property
    def synchronized(self) -> bool:
        return self.connected and self._dead is None

    def report(self) -> WorkerError | None:
        """Its failure, to be raised. It is then cleared, unless the worker is dead."""
        failure = self.failure
        self._reported |= failure is not None
        self._raised = None
        return failure

    def reset_for_successor(self) -> None:
        """Before a rendezvous: forget a failure, so that another process can replace the worker.

        The error of a process that never got any weights is kept until it is reported, and so is
        the death of the first process.
        """
        if self.state == ABSENT:
            self._dead = None
        died_after_another = bool(self.applied) and self._raised is None
        if self.connected or self._reported or died_after_another:
            if self.connected and self._dead is not None:
                self.state = MET
            self._raised = self._dead = None
            self._reported = False

    def sent(self, block: Snapshot, saved_bytes: int) -> None:
        self.last, self.addressed = block, block.version
        self.sends += 1
        self.saved_bytes += saved_bytes

    def last_block_is_intact(self) -> bool:
        """Whether the block sent last still holds what was sent."""
        return self.last is not None and self.last.version == self.addressed

    def book(self, answer: Answer) -> None:
        """Record an answer of the worker."""
        if answer.kind == JOINED:
            self.restarts += self.acknowledged != NEVER
            self.acknowledged, self.state, self.pid = NEVER, MET, answer.pid
            self._raised, self._dead, self._reported = None, None, False
        elif answer.kind == APPLIED:
            self._book_applied(answer)
        elif answer.kind == FAILED:
            self.failures += answer.version > self.answered
            self.answered = max(self.answered, answer.version)
            text = f"{self} raised while applying weights:\n{answer.text.rstrip()}"
            self._raised = WorkerRaised(self.index, text)
        else:
            text = "left: it shut its scheme down" if answer.kind == LEFT else self._ending(answer)
            self._dead = WorkerDied(self.index, f"{self} {text}")

    def _ending(self, answer: Answer) -> str:
        if answer.text.startswith("died"):
            return answer.text
        process = f" (pid {self.pid})" if self.pid else ""
        how = f", {answer.text}" if answer.text else ""
        return f"died{process}{how}: it can take no weights"

    def _book_applied(self, answer: Answer) -> None:
        version = answer.version
        self.state = CONNECTED
        self.acknowledged = max(self.acknowledged, version)
        self.applied += version > self.answered  # else its predecessor had answered it
        self.answered = max(self.answered, version)
        self.retries += answer.retries
        self.verified_calls += answer.verified_calls
        self._recent.append(answer)

    @property
    def recent(self) -> list[Answer]:
        return list(self._recent)

    def since(self, version: int) -> Iterator[Answer]:
        """The answers to later versions, the newest first."""
        for applied in reversed(self.recent):
            if applied.version <= version:
                return
            yield applied

    def summary(self, whole_bytes: int) -> dict[str, Any]:
        """Its part of `scheme.stats`. `whole_bytes`: the size of a block without a wire format."""
        recent, waiting = self.recent, self.answered < self.addressed
        return {
            "addressed": self.sends,
            "bytes": self.sends * whole_bytes - self.saved_bytes,
            "applied": self.applied,
            "coalesced": max(0, self.sends - self.applied - self.failures - waiting),
            "retries": self.retries,
            "failures": self.failures,
            "restarts": self.restarts,
            "wake_ms": percentiles([a.wake_ns for a in recent]),
            "apply_ms": percentiles([a.apply_ns for a in recent]),
            "ack_ms": percentiles([a.acknowledge_ns for a in recent]),
        }

    def overdue(self, seconds: float, who: str, hint: str) -> WorkerTimeout:
        """The error if it did not answer in time. `who` and `hint` come from the channel."""
        if not self.connected:
            started = f"does {who} call" if who else "was its process started, and does it call"
            text = (
                f"did not connect within {seconds:g} s: {started} init_on_receiver() and connect()?"
            )
        else:
            alive = (
                f"{who} is not known to be dead, and is"
                if who
                else f"it is alive (pid {self.pid}),"
            )
            text = (
                f"did not acknowledge version {self.addressed} within {seconds:g} s; {alive} on "
                f"version {self.acknowledged} (a step or reset may take as long as the scheme's "
                "timeout)"
            )
        return WorkerTimeout(self.index, f"{self} {text}{hint}")
