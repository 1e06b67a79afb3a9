"""Trackio, a local dashboard with W&B's interface: `trackio show` opens it.

Everything stays on this machine, in Trackio's own directory (TRACKIO_DIR).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from harness.logging import Histogram, Logger, Metrics, RunInfo
from harness.options.loggers import TrackioConfig
from harness.run.directory import RunDir


class TrackioLogger(Logger):
    """One Trackio run; records are written by Trackio's own thread."""

    def __init__(self, options: TrackioConfig, run_dir: RunDir, info: RunInfo):
        import trackio

        self._histogram, self._finish = trackio.Histogram, trackio.finish
        with contextlib.redirect_stdout(io.StringIO()):  # the display is the harness's
            self._run = trackio.init(
                project=options.project,
                name=info.name,
                group=info.group,
                config=info.options,
                resume="allow" if info.resumed else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram]) -> None:
        bins = {
            name: self._histogram(np_histogram=(histogram.counts, histogram.edges))
            for name, histogram in histograms.items()
        }
        self._run.log({**metrics, **bins}, step=step)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._finish()
