"""What a controller let happen: when a sample's weights acted, and which trained on it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from collectors.schedule.costs import Cost
from lockstep_check.ages import age


@dataclass(frozen=True)
class Workload:
    """How long rollouts take, in units of a training step; the mean is one before stragglers."""

    name: str
    cost: Cost
    stragglers: float = 0.0  # the share of rollouts that take 40 times as long


WORKLOADS = (
    Workload("even", Cost(1.0, "uniform", 0.3)),
    Workload("exponential", Cost(1.0, "exponential")),
    Workload("long tail", Cost(1.0, "lognormal", 3.0)),
    Workload("1 % stragglers", Cost(1.0, "exponential"), 0.01),
)
TAIL = 40.0


@dataclass
class Record:
    """One run of a controller. Versions count the updates that the trainer has done."""

    workload: Workload
    seed: int
    ages: list[int] = field(default_factory=list)
    dropped: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self.publish(0)

    def duration(self) -> float:
        """Of the next rollout."""
        drawn = float(self.workload.cost.draw(self._random)[0])
        return drawn * (TAIL if self._random.random() < self.workload.stragglers else 1.0)

    def publish(self, version: int) -> None:
        self._write("publish", version=version, update=version)

    def act(self, sample: int, version: int) -> None:
        """The oldest weights of the sample."""
        self._write("act", worker=0, sample=sample, version=version, length=1)

    def train(self, sample: int, acted: int, version: int) -> None:
        """The trainer, which has done `version` updates, learns from it."""
        self.ages.append(age(acted, version))
        self._write("train", worker=0, sample=sample, update=version + 1)

    def drop(self, sample: int) -> None:
        self.dropped += 1
        self._write("drop", worker=0, sample=sample, reason="the controller gave it up")

    def _write(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, **values})

    def save(self, path: Path, program: str) -> None:
        """As a trace that `lockstep check` reads."""
        head = {"event": "trace", "format": 1, "program": program, "unit": "samples"}
        path.write_text("".join(f"{json.dumps(event)}\n" for event in [head, *self.events]))
