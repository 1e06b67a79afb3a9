"""TensorBoard event files, written with the package `tensorboard`.

`SummaryWriter` writes from a thread, which prints a traceback when the disk is full. The parts that
it is made of are called here directly: `log` raises the error, and a killed run loses no record.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import require
from harness.logging import Logger, Metrics, RunInfo
from harness.measures.meters import Histogram
from harness.options.run import LoggerConfig
from harness.registry import loggers
from harness.run_directory import RunDir


@dataclass
class TensorBoardConfig(LoggerConfig):
    """Event files for TensorBoard, in the run directory's tensorboard/."""

    def check(self, config: Any) -> None:
        require("logger=tensorboard", "tensorboard", "tensorboard")


@loggers.register("tensorboard", options=TensorBoardConfig)
class TensorBoardLogger(Logger):
    """Scalars and histograms in one event file."""

    def __init__(self, options: TensorBoardConfig, run_dir: RunDir, info: RunInfo):
        from torch.utils.tensorboard import RecordWriter

        folder = run_dir.path / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._stream = open(folder / name, "wb")  # noqa: SIM115
        self._records = RecordWriter(self._stream)
        self._write(file_version="brain.Event:2")

    def log(self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram]) -> None:
        from torch.utils.tensorboard.summary import scalar

        for name, value in metrics.items():
            self._write(step=step, summary=scalar(name, value))
        for name, histogram in histograms.items():
            self._write(step=step, summary=_encoded(name, histogram))
        self._stream.flush()

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._stream.close()

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())


def _encoded(name: str, histogram: Histogram) -> Any:
    from torch.utils.tensorboard.summary import histogram_raw

    counts, edges = np.array(histogram.counts), np.array(histogram.edges)
    middles = (edges[:-1] + edges[1:]) / 2  # what every value in a bin counts as
    return histogram_raw(
        name,
        min=edges[0],
        max=edges[-1],
        num=counts.sum(),
        sum=counts @ middles,
        sum_squares=counts @ middles**2,
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
    )
