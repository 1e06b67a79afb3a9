"""metrics.jsonl: one record per log point, whatever else logs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.files import plain
from harness.loggers.base import Histogram, Logger, Metrics


class JsonlLogger(Logger):
    """Appends `{"step": frames, "time": seconds, name: value, ...}`, a line each, at once."""

    def __init__(self, file: Path):
        self._stream = open(file, "a", encoding="utf-8")  # noqa: SIM115

    def log(self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram]) -> None:
        record = {"step": step, "time": round(time.time(), 3), **metrics}
        self._stream.write(json.dumps(plain(record)) + "\n")
        self._stream.flush()

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._stream.close()
