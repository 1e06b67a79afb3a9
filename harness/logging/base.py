"""The interface of loggers: flat metrics at a frame, histograms, and the end of the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Metrics = Mapping[str, float]
NUM_BINS = 30


@dataclass
class Histogram:
    """How often values fell between consecutive edges; one more edge than counts."""

    counts: list[int]
    edges: list[float]

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Histogram:
        """Of raw values, of which there must be one."""
        counts, edges = np.histogram(np.asarray(values, dtype=np.float64), bins=NUM_BINS)
        return cls(counts.tolist(), edges.tolist())


@dataclass
class RunInfo:
    """Information about the run for loggers."""

    name: str
    options: dict[str, Any]
    group: str | None = None  # the sweep
    job_type: str = ""  # sync/collector
    wandb_id: str = ""
    resumed: bool = False


class Watched(Protocol):
    """What a logger may look at while a run goes on: the runner."""

    collector: Any  # of which `policy_version`, `made_batches()` and `worker_stages()` may be read
    sync: Any  # harness.sync_metrics.SyncMeter
    clock: Any  # harness.metrics.Clock
    frames: int


class Logger(ABC):
    """Receives what a run measures."""

    def start(self, run: Watched) -> None:
        """The loop begins."""

    def phase(self, work: str, start_s: float, end_s: float) -> None:
        """The learner has done something: collect, update, publish, log, evaluate or checkpoint.

        Called several times for every batch, with times of `time.perf_counter()`.
        """

    @abstractmethod
    def log(self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram]) -> None:
        """Record metrics after `step` frames. Must not block for long."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """The run has ended; write everything out."""
