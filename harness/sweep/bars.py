"""On a terminal, a bar for each running job of a sweep, with its frames, return and time left."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, OverflowMethod
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.files import parse_yaml, read_text
from harness.logging.dashboard import duration
from harness.numbers import readable
from harness.run_directory import RunDir

TAIL = 1 << 16  # bytes; the newest records
BAR = 20  # columns


class JobBar:
    """How far a running job is, by the newest records in its directory."""

    def __init__(self, directory: Path):
        self._run_dir = RunDir(directory)
        self._since_s = self._run_dir.status.stat().st_mtime
        self._total = int(parse_yaml(read_text(self._run_dir.config))["total_frames"])
        self._frames, self._return = 0, math.nan
        self._first: tuple[float, int] | None = None  # time and frames of a record of this start
        self._left_s = math.nan

    def look(self) -> None:
        """Read what was added."""
        records = list(_newest_records(self._run_dir.metrics))
        returns = (record.get("episode/return") for record in records)
        value = next((value for value in returns if isinstance(value, int | float)), None)
        self._return = self._return if value is None else value
        if not records:
            return
        self._frames = records[0]["step"]
        # Without those of an earlier start, after which the run was interrupted.
        points = [(one["time"], one["step"]) for one in records if one["time"] >= self._since_s]
        if not points:
            return
        self._first = self._first or points[-1]
        seconds, frames = points[0][0] - self._first[0], points[0][1] - self._first[1]
        if frames > 0:
            self._left_s = seconds / frames * max(self._total - self._frames, 0)

    def cells(self) -> tuple[ProgressBar, str, str, str]:
        """The bar and the words beside it."""
        return (
            ProgressBar(
                self._total,
                self._frames,
                width=BAR,
                style="bright_black",
                complete_style="green",
                finished_style="green",
            ),
            f"{min(self._frames, self._total):,}/{self._total:,} frames",
            "" if math.isnan(self._return) else f"return {readable(self._return, 4)}",
            "" if math.isnan(self._left_s) else f"{duration(self._left_s)} left",
        )


class JobBars:
    """Draws the bars below what is printed, between `start` and `stop`."""

    def __init__(self, console: Console):
        self._bars: dict[Path, JobBar] = {}
        self._overflow: OverflowMethod = "crop" if console.options.ascii_only else "ellipsis"
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def start(self) -> None:
        """Take the terminal: what this process prints from now on stands above the bars."""
        self._live.console.soft_wrap = True  # so that a long command can be copied
        self._live.start()

    def draw(self, running: Sequence[Path]) -> None:
        """Show the jobs in these directories."""
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(5):
            table.add_column(no_wrap=True)
        table.columns[0].no_wrap = False  # so that it is the one that gives way
        for directory in running:
            try:
                bar = self._bars.get(directory) or JobBar(directory)
                bar.look()
            except (OSError, ValueError, LookupError, TypeError):  # its files are being written
                continue
            self._bars[directory] = bar
            name = Text(directory.name, no_wrap=True, overflow=self._overflow)
            table.add_row(name, *bar.cells())
        self._live.update(table, refresh=True)

    def stop(self) -> None:
        """Remove the bars, and give the terminal back."""
        self._live.stop()


def _newest_records(file: Path) -> Iterator[dict[str, Any]]:
    """The last whole records of a metrics.jsonl, the newest first."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        stream.seek(max(0, size - TAIL))
        lines = stream.read(TAIL).split(b"\n")
    lines.pop()  # a line that is not complete, or nothing
    for line in reversed(lines if size <= TAIL else lines[1:]):
        record = json.loads(line)
        if isinstance(record, dict):
            yield record
