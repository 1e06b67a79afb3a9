"""The two halves of a mechanism that moves weights. A new scheme implements these.

    trainer                                          worker
    -------                                          ------
    SenderChannel                                    ReceiverChannel
      free_block(), the caller writes a version
      publish(block, workers)            --->          take(): the newest version
      poll(): APPLIED, FAILED, LEFT ...  <---          answer(APPLIED or FAILED)
      close()                            --->          sender_gone()

A sender channel reaches all workers of one model; a receiver channel belongs to one worker. Neither
ever waits: `Sender` and `Receiver` do, with `fds()`. Versions, retries, timeouts, failures and
statistics are theirs too, so a channel only moves blocks and answers.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sync.model.binding import Binding
from sync.model.layout import CheckFinite, Layout
from sync.model.snapshot import NEVER, Snapshot, private_snapshot

JOINED, APPLIED, FAILED, LEFT, LOST = "joined", "applied", "failed", "left", "lost"

now_ns = time.perf_counter_ns  # one clock for all processes of a machine


class Answer(NamedTuple):
    """What a worker says, or what the channel found out about it.

    JOINED: a process (`pid`) now serves as the worker; whatever came before was its predecessor.
    APPLIED: it uses `version`. FAILED: it could not apply `version`; `text` is its traceback.
    LEFT: it shut its scheme down. LOST: it is gone or out of reach; `text` says how, if known.
    """

    worker: int
    kind: str
    version: int = NEVER
    published_ns: int = 0
    seen_ns: int = 0
    applied_ns: int = 0
    retries: int = 0
    pid: int = 0
    text: str = ""
    return_ns: int = 0  # what the answer took on its way back, if that is known
    verified_calls: int = 0  # since its last answer, with `verify`


class Part(NamedTuple):
    """A block ready to be published, and the workers that can read it.

    Without workers it tells only the channel that made it that the block is published.

    nbytes: how much travels; None if that is the block.
    max_error, relative_error: what a lossy wire format did to the numbers.
    source: what to prepare again for a process that takes a worker's place; None if that is the
        block that was prepared.
    """

    block: Snapshot
    workers: Sequence[int]
    nbytes: int | None = None
    max_error: float = 0.0
    relative_error: float = 0.0
    source: Snapshot | None = None


class SenderChannel(ABC):
    """The trainer's half. Calls come one at a time; `Sender` holds a lock around each.

    mechanism: how versions travel, in a few words; `scheme.stats` reports it.
    handout: what a worker's process needs to make its half; it is pickled with the scheme.
    """

    mechanism: str = "unnamed"

    def __init__(self, layout: Layout, num_workers: int):
        self.layout = layout
        self.num_workers = num_workers
        self.handout: Any = None
        self._pool: list[Snapshot] = []
        self._moved: dict[str, dict[str, int]] = {}

    def pack(
        self, binding: Binding, block: Snapshot, version: int, *, check: CheckFinite, own: bool
    ) -> None:
        """Write the weights into a free block. `own`: they are those of the registered model."""
        binding.pack(block, version, check_finite=check)

    def prepare(self, block: Snapshot, workers: Sequence[int]) -> list[Part]:
        """Turn a written block into what travels. May refuse it (`ValueError`); sends nothing."""
        return [Part(block, workers)]

    @abstractmethod
    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        """Make a prepared block the newest version for these workers. An older one that a worker
        has not taken yet may be dropped.
        """

    @abstractmethod
    def poll(self) -> list[Answer]:
        """The answers since the last call, in order; also makes progress on what is queued."""

    @abstractmethod
    def fds(self) -> list[int]:
        """Descriptors that become readable when `poll` has something to do."""

    @abstractmethod
    def close(self) -> None:
        """Tell the workers that nothing more comes, and release everything. Bounded in time."""

    # -- what most channels leave as it is

    def free_block(self, keep: Collection[Snapshot]) -> Snapshot:
        """A block to write the next version into: none of `keep`, and none still being read.

        By default it is memory of this process alone.
        """
        taken = {id(block) for block in (*keep, *self.blocks_in_use())}
        for block in self._pool:
            if id(block) not in taken:
                return block
        self._pool.append(private_snapshot(self.layout))
        return self._pool[-1]

    @property
    def memory_bytes(self) -> int:
        """How much memory the blocks have taken so far."""
        return len(self._pool) * self.layout.nbytes

    def blocks_in_use(self) -> list[Snapshot]:
        """The private blocks that must not be overwritten yet; none if `publish` copies."""
        return []

    def busy(self) -> bool:
        """Whether something waits here that only `poll` can move on."""
        return False

    def due_ns(self) -> int | None:
        """When `poll` has something to do although no descriptor says so, by `now_ns`."""
        return None

    def expect(self, worker: int) -> None:
        """Before a rendezvous: another process may take the place of a lost worker."""

    def rendezvous_pending(self, worker: int) -> bool:
        """After `expect`: whether it is not known yet which process serves as the worker."""
        return False

    def describe(self, worker: int) -> str:
        """How errors name the worker's process, for instance by its host; empty if unknown."""
        return ""

    def hint(self, worker: int) -> str:
        """What to add to the error if the worker does not answer in time."""
        return ""

    def stats(self, worker: int) -> dict[str, Any]:
        """What this channel adds to the worker's entry in `scheme.stats`."""
        return {}

    def moved(self) -> dict[str, dict[str, int]]:
        """Versions and bytes by mechanism: {"shared memory": {"versions": 3, "bytes": 54000}}."""
        return {mechanism: dict(counts) for mechanism, counts in self._moved.items()}

    def count_moved(self, nbytes: int, mechanism: str = "") -> None:
        """Note that one version was moved: to one worker, or to all at once."""
        counts = self._moved.setdefault(mechanism or self.mechanism, {"versions": 0, "bytes": 0})
        counts["versions"] += 1
        counts["bytes"] += nbytes


class ReceiverChannel(ABC):
    """One worker's half, in the worker's process. `handout` is that of the sender's half.

    Only the thread that waits for versions calls `has_news`, `sender_gone` and `sleeping`, since
    they may read what would wake it. Another may call `take`, and then answers.
    """

    def __init__(self, handout: Any, layout: Layout, worker: int):
        self.handout = handout
        self.layout = layout
        self.worker = worker

    @abstractmethod
    def open(self) -> None:
        """Tell the sender that this process serves as the worker from now on. Does not wait."""

    @abstractmethod
    def take(self) -> Snapshot | None:
        """The newest version, if it was not taken yet. It stays as it is until `answer`."""

    @abstractmethod
    def answer(self, answer: Answer) -> None:
        """Tell the sender what became of the version that was taken."""

    @abstractmethod
    def has_news(self) -> bool:
        """Whether `take` may find something; cheap enough to ask before every step."""

    @abstractmethod
    def fds(self) -> list[int]:
        """Descriptors that become readable, inside `sleeping()`, when there may be news."""

    @abstractmethod
    def sender_gone(self) -> str:
        """Why nothing more can come; empty while something can."""

    @abstractmethod
    def close(self) -> None:
        """Tell the sender that this worker reads no more, and release everything."""

    def keep_block(self) -> None:
        """The model points at the block that was taken: leave it as it is until another is kept."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks that a model can point at")

    def sleeping(self) -> contextlib.AbstractContextManager[Any]:
        """Around a wait for `fds()`: ask the sender to wake this worker."""
        return contextlib.nullcontext()
