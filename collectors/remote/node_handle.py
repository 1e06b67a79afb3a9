"""A seat: the place for one host, and what is known of it.

Whoever takes it after a failure has its number, and another life.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from collectors.data.batch import Trajectories
from collectors.rollout.spaces import Key
from sync.errors import WorkerError

_NOTHING = {"collected": 0, "delivered": 0, "dropped": 0, "in_flight": 0, "restarts": 0}


class Full(NamedTuple):
    """A batch that a host has handed over."""

    entries: dict[Key, Tensor]
    frame_count: int
    generation: int
    serial: int


@dataclass
class NodeHandle:
    """One host, and what is known of it."""

    host: int
    trajectories: Trajectories
    seed: int
    device: str = "cpu"  # of its policy
    name: str = ""
    where: str = ""
    pid: int = 0
    environment: str = ""
    num_envs: int = 0
    first_env: int = -1
    generation: int = 0
    numbered: int = 0  # the life whose trajectories were numbered last
    open: bool = False  # greeted, and not known to have failed
    serial: int = 0  # of the next batch to ask for
    due: int = 0  # of the next batch to hand on: they may arrive in another order
    early: dict[int, Full] = field(default_factory=dict)
    full: deque[Full] = field(default_factory=deque)
    told: dict[str, Any] = field(default_factory=lambda: dict(_NOTHING))  # its last account
    before: int = 0  # frames that earlier lives collected
    handed: int = 0  # frames of this life that were handed on, or dropped instead
    delivered: int = 0
    dropped: int = 0  # of earlier lives, and of before a state was loaded
    fresh_from: tuple[int, int] = (0, 0)  # the life and batch from which on frames count
    restarts: int = 0
    failure: WorkerError | None = None
    beat: Future[Any] | None = None
    unanswered: Future[Any] | None = None  # the account that was asked for last, perhaps answered
    asked_at: float = 0.0
    moved_at: float = 0.0

    @property
    def owed(self) -> int:
        """How many batches it was asked for, and has not handed over."""
        return self.serial - self.due - len(self.early)

    def __str__(self) -> str:
        known = [part for part in (self.where, self.device, self.environment) if part]
        return f"collector {self.host} ({', '.join(known)}, seed {self.seed})"

    def drop(self, full: Full) -> None:
        """Hand a batch on to nobody."""
        self.dropped += full.frame_count
        if full.generation == self.generation:
            self.handed += full.frame_count

    def hear(self, generation: int, frame_counts: dict[str, Any]) -> None:
        """Take in an account of this life, unless a newer one overtook it."""
        if generation != self.generation or frame_counts["number"] <= self.told.get("number", 0):
            return
        moved = ("collected", "version", "restarts")
        if any(frame_counts[name] != self.told.get(name) for name in moved):
            self.moved_at = time.monotonic()
        self.told = frame_counts

    def frame_counts(self) -> dict[str, Any]:
        """Where the frames of all its lives are."""
        told = self.told
        old = sum(full.frame_count for full in self.full if full.generation != self.generation)
        return {
            "worker": self.host,
            "environment": self.environment,
            "where": self.where,
            "collected": self.before + told["collected"],
            "delivered": self.delivered,
            "dropped": self.dropped + told["dropped"],
            "in_flight": old + told["in_flight"] + told["delivered"] - self.handed,
            "restarts": self.restarts + told["restarts"],
            "version": told.get("version", -1),
            "preempted": told.get("preempted", 0),
            "workers": told.get("workers", []),
        }

    def settle(self) -> None:
        """End a life: what its host made and did not hand over is dropped."""
        told = self.told
        here = sum(full.frame_count for full in self.full if full.generation == self.generation)
        self.early.clear()
        self.before += told["collected"]
        self.dropped += told["collected"] - self.handed - here
        self.restarts += told["restarts"]
        self.told = dict(_NOTHING)
        self.handed = 0
        self.serial = self.due = 0
        self.open, self.beat, self.unanswered = False, None, None
        self.generation += 1  # whatever of the one before still comes is not wanted

    def stages(self) -> str:
        """What its workers were doing, as far as it told."""
        told = [
            f"worker {one['worker']} is {one['stage']}"
            for one in self.told.get("workers", [])
            if "stage" in one
        ]
        return f"; {', '.join(told)}" if told else ""
