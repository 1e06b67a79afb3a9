"""The trainer's record of one worker: its channel, its batches, and its frame counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from collectors.data.batch import Filled, Trajectories
from collectors.workers.channel import Hello, WorkerChannel
from sync.errors import WorkerError


@dataclass(eq=False)
class WorkerHandle:
    """One worker. A replacement takes over the handle, as its next generation."""

    index: int
    channel: WorkerChannel
    spec: Any
    trajectories: Trajectories
    name: str = "worker"
    device: str = "cpu"
    environment: str = ""
    num_envs: int = 0
    first_env: int = -1
    generation: int = 0
    numbered: int = 0  # the generation whose trajectories were numbered last
    hello: Hello | None = None
    met: bool = False  # it uses the first version of every model
    failure: WorkerError | None = None
    serial: int = 0  # of the last batch that was ordered
    ordered: dict[int, int] = field(default_factory=dict)  # batches that have not come: versions
    cut: int = -1  # the batch that the worker was told to hand over as it is
    finished: deque[Filled] = field(default_factory=deque)
    answers: dict[int, tuple[bool, Any]] = field(default_factory=dict)
    fresh_from: tuple[int, int] = (0, 0)  # the generation and batch from which on frames count
    earlier: int = 0  # frames that earlier generations collected
    taken: int = 0  # frames of this generation that were delivered, or dropped instead
    delivered: int = 0
    dropped: int = 0  # of earlier generations, and of before a state was loaded
    restarts: int = 0
    last_progress: Any = None
    moved_at: float = 0.0

    def __str__(self) -> str:
        known = self.environment or f"environment made by {_name(self.spec.create_env_fn)}"
        parts = [part for part in (self.channel.where, self.device, known) if part]
        return f"{self.name} {self.index} ({', '.join(parts)}, seed {self.spec.seeds.seed})"

    @property
    def described(self) -> str:
        """The same without its name, for errors of schemes, which number workers themselves."""
        return ", ".join(part for part in (self.channel.where, self.environment) if part)

    @property
    def owed(self) -> int:
        """How many batches were ordered and have not come."""
        return len(self.ordered)

    @property
    def under_way(self) -> int:
        """How many batches were ordered and not taken."""
        return len(self.ordered) + len(self.finished)

    @property
    def collected(self) -> int:
        """The frames that it collected, in all its generations."""
        return self.earlier + int(self.channel.frame_counts()["collected"])

    def is_current(self, filled: Filled) -> bool:
        """Whether the batch's frames count: they were made after the last state was loaded."""
        return (filled.generation, filled.serial) >= self.fresh_from

    def count(self, filled: Filled) -> None:
        """Count the frames of a batch that leaves `finished` as delivered, or as dropped."""
        frames = filled.num_frames
        if self.is_current(filled):
            self.delivered += frames
        else:
            self.dropped += frames
        if filled.generation == self.generation:
            self.taken += frames

    def count_as_dropped(self, filled: Filled) -> None:
        """Count the frames of a batch, which counted as delivered, as dropped."""
        if self.is_current(filled):
            self.delivered -= filled.num_frames
            self.dropped += filled.num_frames

    def start_generation(self) -> None:
        """The worker is gone: frames that it collected but did not deliver are dropped."""
        counts = self.channel.frame_counts()
        waiting = sum(f.num_frames for f in self.finished if f.generation == self.generation)
        self.earlier += counts["collected"]
        self.dropped += counts["collected"] - self.taken - waiting
        self.restarts += counts["restarts"]
        self.taken = self.serial = 0
        self.ordered.clear()
        self.cut = -1
        self.hello, self.met = None, False
        self.answers.clear()
        self.generation += 1
        seeds = self.spec.seeds
        self.spec.seeds = replace(seeds, generation=seeds.generation + 1)

    def frame_counts(self) -> dict[str, Any]:
        """Where the frames of all its generations are."""
        counts = self.channel.frame_counts()
        old = sum(f.num_frames for f in self.finished if f.generation != self.generation)
        return {
            **counts,
            "worker": self.index,
            "environment": self.environment,
            "collected": self.earlier + counts["collected"],
            "delivered": self.delivered,
            "dropped": self.dropped + counts["dropped"],
            "in_flight": old + counts["in_flight"] + counts["delivered"] - self.taken,
            "restarts": self.restarts + counts["restarts"],
        }


def _name(factory: Any) -> str:
    if isinstance(factory, list):
        factory = factory[0]
    return str(getattr(factory, "__qualname__", factory))
