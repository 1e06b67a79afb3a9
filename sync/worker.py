"""The sender's record of one worker."""

from __future__ import annotations

import torch

from sync.channel import APPLIED, FAILED, JOINED, LEFT, Answer
from sync.errors import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from sync.model.snapshot import NEVER, Snapshot
from sync.stats import Applied, WorkerStats


class WorkerRecord:
    """The versions that a worker was sent and has acknowledged, and its failure.

    addressed, acknowledged: the version it was sent last, and the newest that it is known to use.
    last: the block of the version it was sent last, for a process that replaces it.
    """

    def __init__(self, index: int, device: torch.device | None):
        self.index = index
        self.device = device
        self.label = ""
        self.stats = WorkerStats()
        self.addressed = self.answered = self.acknowledged = NEVER
        self.connected = False
        self.pid = 0
        self.last: Snapshot | None = None
        self._raised: WorkerError | None = None
        self._dead: WorkerError | None = None
        self._reported = self._joined = self._served = False

    def __str__(self) -> str:
        known = [str(self.device or "cpu"), *([self.label] if self.label else [])]
        return f"worker {self.index} ({', '.join(known)})"

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
        if not self._joined:  # no process has served as this worker yet
            self._dead = None
        died_after_another = bool(self.stats.applied) and self._raised is None
        if self._served or self._reported or died_after_another:
            self.connected &= self._dead is None
            self._raised = self._dead = None
            self._reported = False

    def sent(self, block: Snapshot) -> None:
        self.last, self.addressed = block, block.version
        self.stats.addressed += 1

    def last_block_is_intact(self) -> bool:
        """Whether the block sent last still holds what was sent."""
        return self.last is not None and self.last.version == self.addressed

    def book(self, answer: Answer) -> None:
        """Record an answer of the worker."""
        if answer.kind == JOINED:
            self.stats.restarts += self.acknowledged != NEVER
            self._joined, self._served, self._reported = True, False, False
            self.acknowledged, self.connected, self.pid = NEVER, False, answer.pid
            self._raised = self._dead = None
        elif answer.kind == APPLIED:
            self._book_applied(answer)
        elif answer.kind == FAILED:
            self.stats.failures += answer.version > self.answered
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
        self.connected = self._served = True
        self.acknowledged = max(self.acknowledged, version)
        again = version <= self.answered
        self.answered = max(self.answered, version)
        self.stats.verified_calls += answer.verified_calls
        applied = Applied(
            version,
            wake_ns=answer.seen_ns - answer.published_ns,
            apply_ns=answer.applied_ns - answer.seen_ns,
            acknowledge_ns=answer.applied_ns - answer.published_ns + answer.return_ns,
            retries=answer.retries,
            published_ns=answer.published_ns,
        )
        self.stats.add(applied, again=again)

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
