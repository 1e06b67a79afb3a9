"""The trainer's end of one worker: a process on this machine, or on another one.

    pool                                handle                           worker
    ----                                ------                           ------
    start(spec)                    ->   start it                    ->   make policy, environments
                                   <-   Hello                       <-
                                   <-   Met                         <-    takes version 0
    order(serial, versions)        ->   one batch, please           ->   collect
                                   <-   Filled                      <-
    ask(number, method, args)      ->   between two steps: do this  ->   do it
                                   <-   Answer                      <-
    tell_to_stop(), end(timeout)   ->   stop                        ->   leave

Messages of the worker are queued until the pool calls `receive`, which never waits.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from collectors.data.batch import TrajectoryNumbers, WorkerBatch
from collectors.rollout.frame_block import FrameBlock
from collectors.workers.messages import Event, Filled, Hello
from sync.errors import WorkerError

# Where a worker's frames are, and how often it was replaced.
FRAME_COUNTS = ("collected", "delivered", "dropped", "in_flight", "restarts")


class CannotReplace(RuntimeError):
    """This process cannot start a replacement for a lost process."""


class WorkerHandle(ABC):
    """One worker: its connection, its batches, and its frame counts.

    A replacement takes over the handle, as its next generation: `start` is called again after
    `end`.

    device: of the policy, for error messages. where: the worker's place, for the same.
    """

    name = "worker"
    where = ""

    def __init__(self, index: int, spec: Any, trajectories: TrajectoryNumbers, device: str):
        self.index = index
        self.spec = spec
        self.trajectories = trajectories
        self.device = device
        self.group: tuple[WorkerHandle, ...] = (self,)  # that make a batch together
        self.environment = ""
        self.num_envs = 0
        self.first_env = -1
        self.generation = 0
        self.numbered = 0  # the generation whose trajectories were numbered last
        self.hello: Hello | None = None
        self.met = False  # it uses the first version of every model
        self.failure: WorkerError | None = None
        self.serial = 0  # of the last batch that was ordered
        self.ordered: dict[int, int] = {}  # batches that have not come: versions
        self.cut_serial = -1  # the batch that the worker was told to hand over as it is
        self.finished: deque[WorkerBatch] = deque()
        self.answers: dict[int, tuple[bool, Any]] = {}
        self.fresh_from = (0, 0)  # the generation and batch from which on frames count
        self.earlier = 0  # frames that earlier generations collected
        self.taken = 0  # frames of this generation that were delivered, or dropped instead
        self.delivered = 0
        self.dropped = 0  # of earlier generations, and of before a state was loaded
        self.restarts = 0
        self.last_progress: Any = None
        self.moved_at = 0.0

    def __str__(self) -> str:
        environment = self.environment or f"environment made by {_name(self.spec.create_env_fn)}"
        parts = [part for part in (self.where, self.device, environment) if part]
        return f"{self.name} {self.index} ({', '.join(parts)}, seed {self.spec.seeds.seed})"

    @property
    def described(self) -> str:
        """The same without its name, for errors of schemes, which number workers themselves."""
        return ", ".join(part for part in (self.where, self.environment) if part)

    # -- messages

    @abstractmethod
    def start(self, spec: Any) -> None:
        """Start the worker that `spec` describes; returns at once."""

    @abstractmethod
    def order(self, serial: int, versions: Mapping[str, int]) -> None:
        """Request one batch, with weights no older than these versions, by model."""

    @abstractmethod
    def frames(self, filled: Filled) -> FrameBlock:
        """The block of a batch that was received just now."""

    def release(self, block: int) -> None:
        """The batch in this block is no longer needed: its memory can be overwritten."""

    def cut(self, serial: int) -> None:
        """Have the worker hand over this batch as it is."""
        raise NotImplementedError

    @abstractmethod
    def ask(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        """Call a method of the worker between two steps."""

    @abstractmethod
    def receive(self) -> list[Event]:
        """All events since the last call."""

    @abstractmethod
    def fds(self) -> list[int]:
        """Descriptors that become readable when there may be something to receive."""

    # -- watching

    @abstractmethod
    def gone(self) -> str | None:
        """How the worker's process ended, as it follows "died" in a message; None while it runs."""

    def must_look(self) -> bool:
        """Whether the process may be gone without any descriptor showing it."""
        return True

    @abstractmethod
    def progress(self) -> Hashable:
        """Something that changes while the worker makes progress."""

    def is_busy(self) -> bool:
        """Whether the worker is known to be busy with something other than a batch."""
        return False

    @abstractmethod
    def activity(self) -> str:
        """What the worker does, as it follows "it" in a message."""

    def patience(self, timeout: float) -> float:
        """How long the worker may go on with its current activity without progress."""
        return timeout

    @abstractmethod
    def stuck(self, timeout: float) -> str:
        """The error text for a worker without progress, as it follows its name."""

    def stamps_so_far(self, serial: int) -> Tensor | None:
        """The versions [envs, steps] of the current batch, including the current step, also of
        steps in which environments only reset; None if not known here."""
        return None

    # -- ending

    @abstractmethod
    def tell_to_stop(self, timeout: float, close_env: bool) -> None:
        """Ask the worker to end; returns at once."""

    @abstractmethod
    def end(self, timeout: float) -> None:
        """Wait so long for the worker's end, then force it."""

    def make_way(self) -> None:
        """End what is left of a worker that failed, so that another can be started."""
        self.end(0.0)

    @abstractmethod
    def close(self) -> None:
        """Release what the connection itself holds."""

    # -- its batches

    @property
    def owed(self) -> int:
        """How many batches were ordered and have not come."""
        return len(self.ordered)

    @property
    def under_way(self) -> int:
        """How many batches were ordered and not taken."""
        return len(self.ordered) + len(self.finished)

    def finish(self, filled: Filled) -> WorkerBatch:
        """The batch that was received just now."""
        return WorkerBatch(
            self.frames(filled),
            filled.steps,
            filled.num_frames,
            worker=self.index,
            first_env=self.first_env,
            generation=self.generation,
            trajectories=self.trajectories,
            serial=filled.serial,
            block=filled.block,
            version=self.ordered.pop(filled.serial),
            made_s=filled.made_s,
            ended_ns=filled.ended_ns or time.perf_counter_ns(),
        )

    def is_current(self, batch: WorkerBatch) -> bool:
        """Whether the batch's frames count: they were made after the last state was loaded."""
        return (batch.generation, batch.serial) >= self.fresh_from

    # -- its frame counts

    @abstractmethod
    def reported_counts(self) -> dict[str, Any]:
        """The frames "collected" in this generation, as far as is known, and what else is."""

    def refresh(self) -> None:
        """Ask for counts of this moment, unless they are at hand."""

    def is_fresh(self) -> bool:
        """Whether the counts that `refresh` asked for have come, or are not to be waited for."""
        return True

    @property
    def collected(self) -> int:
        """The frames that it collected, in all its generations."""
        return self.earlier + int(self.reported_counts()["collected"])

    def count(self, batch: WorkerBatch) -> None:
        """Count the frames of a batch that leaves `finished` as delivered, or as dropped."""
        if self.is_current(batch):
            self.delivered += batch.num_frames
        else:
            self.dropped += batch.num_frames
        if batch.generation == self.generation:
            self.taken += batch.num_frames

    def count_as_dropped(self, batch: WorkerBatch) -> None:
        """Count the frames of a batch, which counted as delivered, as dropped."""
        if self.is_current(batch):
            self.delivered -= batch.num_frames
            self.dropped += batch.num_frames

    def start_generation(self) -> None:
        """The worker is gone: frames that it collected but did not deliver are dropped."""
        collected = self.reported_counts()["collected"]
        waiting = sum(b.num_frames for b in self.finished if b.generation == self.generation)
        self.earlier += collected
        self.dropped += collected - self.taken - waiting
        self.taken = self.serial = 0
        self.ordered.clear()
        self.cut_serial = -1
        self.hello, self.met = None, False
        self.answers.clear()
        self.generation += 1
        seeds = self.spec.seeds
        self.spec.seeds = replace(seeds, generation=seeds.generation + 1)

    def frame_counts(self) -> dict[str, Any]:
        """Where the frames of all its generations are."""
        counts = self.reported_counts()
        old = sum(b.num_frames for b in self.finished if b.generation != self.generation)
        return {
            **counts,
            "worker": self.index,
            "environment": self.environment,
            "collected": self.earlier + counts["collected"],
            "delivered": self.delivered,
            "dropped": self.dropped,
            # Not what is missing from the other three: their sum is a promise.
            "in_flight": old + counts["collected"] - self.taken,
            "restarts": self.restarts,
        }


def failures_of(handles: Iterable[WorkerHandle]) -> dict[int, WorkerError]:
    """The failures of these workers, by their numbers."""
    return {handle.index: handle.failure for handle in handles if handle.failure is not None}


def _name(factory: Any) -> str:
    if isinstance(factory, list):
        factory = factory[0]
    return str(getattr(factory, "__qualname__", factory))
