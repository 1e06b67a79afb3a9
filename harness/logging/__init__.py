"""Loggers: metrics.jsonl always, and those that the config names."""

from __future__ import annotations

import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.callbacks import RunView
from harness.files import plain
from harness.measures.meters import Histogram
from harness.options.run import LoggerConfig
from harness.registry import loggers
from harness.run_directory import RunDir

log = logging.getLogger(__name__)

Metrics = Mapping[str, float]


@dataclass
class RunInfo:
    """Information about the run for loggers."""

    name: str
    options: dict[str, Any]
    group: str | None = None  # the sweep
    job_type: str = ""  # sync/collector
    wandb_id: str = ""
    resumed: bool = False


class Logger(ABC):
    """Receives what a run measures.

    remark: what a person has to know of it when the run has ended.
    """

    remark = ""

    def start(self, run: RunView) -> None:
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


class JsonlLogger(Logger):
    """Appends `{"step": frames, "time": seconds, name: value, ...}`, a line each, at once.

    What cannot be written, on a full disk say, is tried again with each record that follows.
    """

    def __init__(self, file: Path):
        self._file = file
        self._stream = open(file, "ab", buffering=0)  # noqa: SIM115
        self._unwritten = b""
        self._waits = False

    def log(self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram]) -> None:
        record = {"step": step, "time": round(time.time(), 3), **metrics}
        self._unwritten += (json.dumps(plain(record)) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            if not self._waits:
                log.error("%s cannot be written, records are kept: %s", self._file, error)
            self._waits = True

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        with self._stream:
            self._write()
            if not os.fstat(self._stream.fileno()).st_nlink:
                raise OSError(f"{self._file} was removed, and its records are lost")

    def _write(self) -> None:
        while self._unwritten:
            written = self._stream.write(self._unwritten)
            self._unwritten = self._unwritten[written:]
        if self._waits:
            log.warning("%s can be written again; no record was lost", self._file)
            self._waits = False


@dataclass
class JsonlConfig(LoggerConfig):
    """Only metrics.jsonl, which every run writes."""


@loggers.register("jsonl", options=JsonlConfig)
def no_more_loggers(options: Any, run_dir: Any, info: Any) -> None:
    """`logger=jsonl`: every run has this logger anyway."""


class Loggers(Logger):
    """Several loggers as one. A logger that fails is turned off, with a warning."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = list(loggers)
        self.remarks: list[str] = []  # of those that have finished

    def log(
        self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram] | None = None
    ) -> None:
        self._each(lambda logger: logger.log(step, metrics, histograms or {}))

    def start(self, run: RunView) -> None:
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
        self.remarks = [logger.remark for logger in self._loggers if logger.remark]
        self._loggers = []


def make_loggers(chosen: Mapping[str, Any], run_dir: RunDir, info: RunInfo) -> Loggers:
    """The loggers that a run has: metrics.jsonl, and those of its config, options by name."""
    others = [loggers.get(name).load()(options, run_dir, info) for name, options in chosen.items()]
    return Loggers([JsonlLogger(run_dir.metrics), *(logger for logger in others if logger)])
