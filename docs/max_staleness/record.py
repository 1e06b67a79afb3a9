"""What a controller let happen in one run: ages of the samples at their use, and a trace."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from collectors.simulation.costs import Cost
from lockstep_check.ages import age


@dataclass(frozen=True)
class Workload:
    """How long rollouts take, in units of a training step."""

    name: str
    cost: Cost
    stragglers: float = 0.0  # the share of rollouts that take `FACTOR` times as long


FACTOR = 20.0
WORKLOADS = (
    Workload("short", Cost(0.5, "exponential")),
    Workload("even", Cost(2.0, "uniform", 0.3)),
    Workload("exponential", Cost(2.0, "exponential")),
    Workload("long tail", Cost(2.0, "lognormal", 3.0)),
    Workload("stragglers", Cost(2.0, "exponential"), 0.01),
)
TRAINING = Cost(1.0, "uniform", 0.1)
UPDATES = 200
BATCH = 8  # samples (groups of rollouts) of an update


@dataclass
class Record:
    """One run of a controller. A version counts the updates that its weights hold."""

    workload: Workload
    seed: int
    updates: int = UPDATES
    ages: list[int] = field(default_factory=list)
    dropped: int = 0
    version: int = 0  # of the trainer
    time: float = 0.0  # of the whole run
    _events: list[dict[str, Any]] = field(default_factory=list)
    _acted: dict[int, int] = field(default_factory=dict)  # samples in flight

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._write("publish", version=0, update=0)

    @property
    def done(self) -> bool:
        """Whether the trainer has done all its updates."""
        return self.version >= self.updates

    def duration(self) -> float:
        """Of the next rollout."""
        drawn = float(self.workload.cost.draw(self._random)[0])
        return drawn * (FACTOR if self._random.random() < self.workload.stragglers else 1.0)

    def training(self) -> float:
        """Duration of the next update."""
        return float(TRAINING.draw(self._random)[0])

    def act(self, sample: int, version: int) -> None:
        """The oldest weights that act in the sample are these."""
        self._acted[sample] = version
        self._write("act", worker=0, sample=sample, version=version, length=1)

    def train(self, samples: list[int]) -> None:
        """The trainer starts an update with these samples."""
        for sample in samples:
            self.ages.append(age(self._acted.pop(sample), self.version))
            self._write("train", worker=0, sample=sample, update=self.version + 1)

    def trained(self) -> None:
        """The update is done."""
        self.version += 1
        self._write("publish", version=self.version, update=self.version)

    def drop(self, sample: int) -> None:
        """The sample is given up."""
        self._acted.pop(sample, None)
        self.dropped += 1
        self._write("drop", worker=0, sample=sample, reason="the controller gave it up")

    def _write(self, event: str, **values: Any) -> None:
        self._events.append({"event": event, **values})

    def save(self, path: Path, program: str) -> None:
        """Write the trace that `lockstep check` reads."""
        head = {"event": "trace", "format": 1, "program": program}
        path.write_text("".join(f"{json.dumps(event)}\n" for event in [head, *self._events]))
