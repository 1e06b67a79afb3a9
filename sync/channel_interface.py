"""The two halves of a mechanism that moves weights. A new scheme implements these.

    trainer                                          worker
    -------                                          ------
    SenderChannel                                    ReceiverChannel
      free_block(), the caller writes a version
      publish(block, workers)            --->          take(): the newest version
      poll(): APPLIED, FAILED, LEFT ...  <---          answer(APPLIED or FAILED)
      close()                            --->          sender_gone()

A sender channel reaches all workers of one model; a receiver channel belongs to one worker. A
channel only moves blocks and answers, and never waits. `Sender` and `Receiver` wait, with `fds()`,
and handle versions, retries, timeouts, failures and statistics.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from sync.model.binding import Binding
from sync.model.block import NEVER, CheckFinite, Layout, Snapshot, free_private

JOINED, APPLIED, FAILED, LEFT, LOST = "joined", "applied", "failed", "left", "lost"

now_ns = time.perf_counter_ns  # one clock for all processes of a machine
LATER = 1 << 62  # by that clock: never


class Answer(NamedTuple):
    """What a worker reports, or what the channel found out about it.

    JOINED: a process (`pid`) now serves as the worker; earlier answers came from its predecessor.
    APPLIED: it uses `version`. FAILED: it could not apply `version`; `text` is its traceback.
    LEFT: it shut its scheme down. LOST: it died or cannot be reached; `text` says how, if known.
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
    return_ns: int = 0  # how long the answer travelled, if known
    verified_calls: int = 0  # with `verify`: checked since the last answer

    @property
    def wake_ns(self) -> int:
        """From the publication until the worker saw the version."""
        return self.seen_ns - self.published_ns

    @property
    def apply_ns(self) -> int:
        """How long it took to apply the version."""
        return self.applied_ns - self.seen_ns

    @property
    def acknowledge_ns(self) -> int:
        """From the publication until the sender knew that the version is in use."""
        return self.applied_ns - self.published_ns + self.return_ns


class About(NamedTuple):
    """What a channel knows of a worker.

    process: how errors name its process, for instance by its host; empty if unknown.
    hint: a hint to add to the error if the worker does not answer in time.
    statistics: entries to add to the worker's part of `scheme.stats`.
    is_unknown: after `meet`, whether it is still unknown which process serves as the worker.
    """

    process: str = ""
    hint: str = ""
    statistics: Mapping[str, Any] = MappingProxyType({})
    is_unknown: bool = False


class SenderChannel(ABC):
    """The trainer's half. Calls come one at a time; `Sender` holds a lock around each.

    mechanism: how versions travel, in a few words; `scheme.stats` reports it.
    handout: what a worker's process needs to create its half; it is pickled with the scheme.
    moved: versions and bytes by mechanism: {"shared memory": {"versions": 3, "bytes": 54000}}.
    keeps_last: whether a version is written beside the last one, and not over it. Then weights are
        checked while they are copied; else all are checked before the first is.
    """

    mechanism: str = "unnamed"
    keeps_last: bool = False

    def __init__(self, layout: Layout, num_workers: int):
        self.layout = layout
        self.num_workers = num_workers
        self.handout: Any = None
        self._pool: list[Snapshot] = []
        self.moved: dict[str, dict[str, int]] = {}

    def pack(
        self, binding: Binding, block: Snapshot, version: int, check: CheckFinite, *, own: bool
    ) -> None:
        """Write the weights into a free block, or raise if they cannot be sent.

        own: whether they are the registered model's.
        """
        binding.pack(block, version, check)

    @abstractmethod
    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        """Make a written block the newest version for these workers. An older one that a worker
        has not taken yet may be dropped.
        """

    @abstractmethod
    def poll(self) -> list[Answer]:
        """The answers since the last call, in order. Also makes progress on queued versions."""

    @abstractmethod
    def fds(self) -> list[int]:
        """Descriptors that become readable when `poll` has something to do."""

    @abstractmethod
    def close(self) -> None:
        """Tell the workers that no more versions come, and release everything. Bounded in time."""

    # -- what few channels override

    def free_block(self, keep: Collection[Snapshot]) -> Snapshot:
        """A block to write the next version into: none of `keep`, and none still being read.

        By default it is memory of this process alone.
        """
        return free_private(self._pool, self.layout, [*keep, *self.blocks_in_use()])

    def blocks_in_use(self) -> list[Snapshot]:
        """The private blocks that must not be overwritten yet; none if `publish` copies."""
        return []

    def moved_bytes(self, block: Snapshot) -> int:
        """How many bytes move when this block is published."""
        return block.nbytes

    def due_ns(self) -> int | None:
        """When to call `poll` although no descriptor is readable, by `now_ns`; None if nothing is
        queued. `LATER` if something is queued that waits for a descriptor.
        """
        return None

    def meet(self, worker: int) -> None:
        """Before a rendezvous: another process may replace a lost worker."""

    def about(self, worker: int) -> About:
        """What is known of a worker, besides its answers."""
        return About()

    def count_moved(self, nbytes: int, mechanism: str = "", times: int = 1) -> None:
        """Count one version that was moved, to one worker or to all at once."""
        counts = self.moved.setdefault(mechanism or self.mechanism, {"versions": 0, "bytes": 0})
        counts["versions"] += times
        counts["bytes"] += nbytes * times


class ReceiverChannel(ABC):
    """One worker's half, in the worker's process. `handout` is that of the sender's half.

    Only the thread that waits for versions may call `has_news`, `sender_gone` and `sleeping`, since
    they may consume what would wake it. Another thread may call `take`; that thread then answers.

    look_every_s: how often a worker that waits calls `has_news` although no descriptor is readable.
    """

    look_every_s: float = 3600.0

    def __init__(self, handout: Any, layout: Layout, worker: int):
        self.handout = handout
        self.layout = layout
        self.worker = worker

    @abstractmethod
    def open(self) -> None:
        """Tell the sender that this process now serves as the worker. Does not wait."""

    @abstractmethod
    def take(self) -> Snapshot | None:
        """The newest version, if it was not taken yet. It does not change until `answer`."""

    @abstractmethod
    def answer(self, answer: Answer) -> None:
        """Tell the sender whether the version that was taken could be applied."""

    @abstractmethod
    def has_news(self) -> bool:
        """Whether `take` may find something; cheap enough to call before every step."""

    @abstractmethod
    def fds(self) -> list[int]:
        """Descriptors that become readable, inside `sleeping()`, when there may be news."""

    @abstractmethod
    def sender_gone(self) -> str:
        """Why no more versions can come; empty as long as they can."""

    @abstractmethod
    def close(self) -> None:
        """Tell the sender that this worker stops reading, and release everything."""

    def keep_block(self) -> None:
        """The model points at the block that was taken: keep it until another one is kept."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks that a model can point at")

    def sleeping(self) -> contextlib.AbstractContextManager[Any]:
        """Around a wait for `fds()`: ask the sender to wake this worker."""
        return contextlib.nullcontext()
