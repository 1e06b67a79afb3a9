"""One worker as the trainer knows it: its process, its line, its blocks, and its frames."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from collectors.data.batch import Trajectories
from collectors.rollout.frame_block import FrameBlock
from collectors.workers.pipe import Pipe
from collectors.workers.shared_counters import FRAMES, VERSION, SharedCounters
from sync.errors import WorkerError
from sync.local.memory import AnonymousMemory
from sync.local.process import Watch


class Full(NamedTuple):
    """A block that a worker has filled."""

    frames: FrameBlock
    block: int
    serial: int
    steps: int
    frame_count: int
    generation: int


@dataclass
class WorkerHandle:
    """One worker, and what is known of it. A replacement takes over the same member."""

    worker: int
    trajectories: Trajectories
    generation: int = 0
    process: Any = None
    pipe: Pipe | None = None
    counters: SharedCounters = field(default_factory=SharedCounters)
    watch: Watch | None = None
    job: AnonymousMemory | None = None
    num_envs: int = 0
    environment: str = ""
    factory: str = ""
    device: str = "cpu"  # of its policy
    seed: int = 0
    blocks: list[FrameBlock] = field(default_factory=list)
    full: deque[Full] = field(default_factory=deque)
    results: dict[int, tuple[bool, Any]] = field(default_factory=dict)
    failure: WorkerError | None = None
    greeted: bool = False
    ordered: int = 0  # blocks that it has been told to fill, and has not
    outdated: int = 0  # up to this order, blocks hold frames from before a state was loaded
    numbered: int = 0  # the life whose trajectories were numbered last
    before: int = 0  # frames that earlier lives made
    handed: int = 0  # frames of this life that were taken from its blocks
    delivered: int = 0
    dropped: int = 0
    restarts: int = 0
    seen: tuple[int, int, int] = (-1, -1, -1)
    seen_at: float = 0.0

    def __str__(self) -> str:
        known = self.environment or f"environment made by {self.factory}"
        return f"worker {self.worker} ({self.device}, {known}, seed {self.seed})"

    @property
    def made(self) -> int:
        """The frames that it made, in all its lives."""
        return self.before + self.counters.values[FRAMES]

    def settle(self) -> None:
        """What a dead worker made and did not hand over is dropped."""
        made = self.counters.values[FRAMES]
        waiting = sum(full.frame_count for full in self.full if full.generation == self.generation)
        self.dropped += made - waiting - self.handed
        self.before += made
        self.handed = 0

    def frame_counts(self, num_blocks: int) -> dict[str, Any]:
        """Where each of its frames is; it fills so many blocks."""
        made = self.counters.values[FRAMES]
        waiting = sum(full.frame_count for full in self.full if full.generation != self.generation)
        in_blocks = sum(self.counters.frames_in(block, made) for block in range(num_blocks))
        return {
            "worker": self.worker,
            "environment": self.environment,
            "pid": None if self.process is None else self.process.pid,
            "stage": self.counters.stage,
            "collected": self.before + made,
            "delivered": self.delivered,
            "dropped": self.dropped,
            "in_flight": waiting + in_blocks,
            "restarts": self.restarts,
            "version": self.counters.values[VERSION],
        }
