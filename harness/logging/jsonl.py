"""metrics.jsonl: one record per log point, whatever else logs."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.files import plain
from harness.logging.base import Histogram, Logger, Metrics

log = logging.getLogger(__name__)


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


def no_more_loggers(options: Any, run_dir: Any, info: Any) -> None:
    """`logger=jsonl`: every run has this logger anyway."""
