"""The learner's time by phase, and what its process uses of the machine."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from harness.measures import PHASES
from harness.saved_state import Stateful

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Clock(Stateful):
    """Where the time goes, by phase. Pauses for evaluations are in no phase.

    on_phase: called with the name of each phase that ends, its start and its end (perf_counter).
    """

    STATE = ("total", "evaluate_s", "wall_s")

    def __init__(self, on_phase: Callable[[str, float, float], None] | None = None) -> None:
        self._on_phase = on_phase
        self.total = dict.fromkeys(PHASES, 0.0)
        self.evaluate_s = 0.0
        self._fresh = dict.fromkeys(PHASES, 0.0)
        self._read_at = self._counts_from = time.perf_counter()

    @contextmanager
    def phase(self, name: str, work: str | None = None) -> Iterator[None]:
        """Count the time in here to a phase. work: what is done in it, if that has its own name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.total[name] += end - start
            self._fresh[name] += end - start
            if self._on_phase is not None:
                self._on_phase(work or name, start, end)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Leave the time in here out of all phases and of the time in all."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.evaluate_s += end - start
            self._read_at += end - start
            self._counts_from += end - start
            if self._on_phase is not None:
                self._on_phase("evaluate", start, end)

    def read(self) -> tuple[dict[str, float], float]:
        """Seconds of each phase since the last reading, and of everything."""
        now = time.perf_counter()
        elapsed, self._read_at = now - self._read_at, now
        spent_s, self._fresh = self._fresh, dict.fromkeys(PHASES, 0.0)
        return {f"time/{name}_s": spent for name, spent in spent_s.items()}, elapsed

    @property
    def wall_s(self) -> float:
        """Seconds since the start, less those of evaluations and between a run and its resumption.

        To set it is to go on from there.
        """
        return time.perf_counter() - self._counts_from

    @wall_s.setter
    def wall_s(self, spent_s: float) -> None:
        self._counts_from = time.perf_counter() - spent_s


def percentiles(values: list[float], name: str) -> dict[str, float]:
    """`name_p50`, `name_p95` and `name_p99` (nearest rank)."""
    if not values:
        return {}
    ranked = sorted(values)
    return {
        f"{name}_{label}": ranked[round(share * (len(ranked) - 1))]
        for label, share in SHARES.items()
    }


def system_metrics() -> dict[str, float]:
    """What this process uses of the machine."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    metrics = {
        "system/cpu_s": usage.ru_utime + usage.ru_stime,
        "system/memory_mb": usage.ru_maxrss / 1024,
        "system/load": os.getloadavg()[0],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        metrics["system/cuda_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return metrics
