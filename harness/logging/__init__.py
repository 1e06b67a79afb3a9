"""Loggers: metrics.jsonl always, and those that the config names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.logging.base import Histogram, JsonlLogger, Logger, Metrics, RunInfo, Watched
from harness.registry import loggers
from harness.run.directory import RunDir

__all__ = ["Histogram", "Logger", "Loggers", "Metrics", "RunInfo", "Watched", "make_loggers"]

log = logging.getLogger(__name__)


class Loggers(Logger):
    """Several loggers as one. A logger that fails is turned off, with a warning."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = list(loggers)

    def log(
        self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram] | None = None
    ) -> None:
        self._each(lambda logger: logger.log(step, metrics, histograms or {}))

    def start(self, run: Watched) -> None:
        self._each(lambda logger: logger.start(run))

    def phase(self, work: str, start_s: float, end_s: float) -> None:
        self._each(lambda logger: logger.phase(work, start_s, end_s))

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self._loggers):
            try:
                call(logger)
            except Exception as error:
                log.info("a logger failed", exc_info=True)
                log.error("%s failed and is turned off: %s", type(logger).__name__, error)
                self._loggers.remove(logger)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._each(lambda logger: logger.finish(summary, exit_code))
        self._loggers = []


def make_loggers(chosen: Mapping[str, Any], run_dir: RunDir, info: RunInfo) -> Loggers:
    """The loggers that a run has: metrics.jsonl, and those of its config, options by name."""
    others = [loggers.get(name).load()(options, run_dir, info) for name, options in chosen.items()]
    return Loggers([JsonlLogger(run_dir.metrics), *(logger for logger in others if logger)])
