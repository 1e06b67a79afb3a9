"""What a soak's samples and records say: slopes with intervals, throughput, drift of counters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

PIECES = 10  # whose means a line is put through: samples a second apart say the same thing twice
WARM_UP = 1 / 3  # of the time: allocators and the newest few thousand times of the schemes fill up
LEVEL = 0.95
SLOPES = (
    "trainer_mb",
    "workers_mb",
    "descriptors",
    "threads",
    "processes",
    "shm_entries",
    "shm_mb",
)
ENDS = 0.1  # of the time after the warm-up, at its start and at its end: speeds to compare


@dataclass
class Soak:
    """One algorithm's hours."""

    algo: str
    minutes: float
    kills: int
    status: int  # with which the run ended, when it was interrupted
    state: str
    samples: list[dict[str, float]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Slope:
    """Of a line, per hour."""

    value: float
    low: float
    high: float

    @property
    def is_flat(self) -> bool:
        """Whether no change at all would explain it."""
        return self.low <= 0 <= self.high


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Of the line through the means of equal pieces of the time, per hour, with its interval."""
    times, heights = np.asarray(seconds) / 3600, np.asarray(values, float)
    if len(times) < 2 * PIECES:
        return Slope(math.nan, -math.inf, math.inf)
    pieces = np.array_split(np.arange(len(times)), PIECES)
    x = np.array([times[piece].mean() for piece in pieces])
    y = np.array([heights[piece].mean() for piece in pieces])
    spread = ((x - x.mean()) ** 2).sum()
    value = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    rest = y - y.mean() - value * (x - x.mean())
    freedom = PIECES - 2
    error = math.sqrt(float((rest**2).sum()) / freedom / float(spread))
    away = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error
    return Slope(value, value - away, value + away)


def figures(run: Soak) -> dict[str, Any]:
    """All that is reported of one soak."""
    last_s = run.samples[-1]["seconds"]
    warm = [sample for sample in run.samples if sample["seconds"] >= last_s * WARM_UP]
    seconds = [sample["seconds"] for sample in warm]
    slopes = {name: slope(seconds, [sample[name] for sample in warm]) for name in SLOPES}
    first, last = speeds(run.records)
    return {
        "kills": run.kills,
        "exit_status": run.status,
        "state": run.state,
        "slopes_per_hour": {name: vars(found) for name, found in slopes.items()},
        "first": {name: warm[0][name] for name in SLOPES},
        "last": {name: warm[-1][name] for name in SLOPES},
        "fps_first": first,
        "fps_last": last,
        "drift": drift(run.records),
        "frames": run.records[-1]["step"],
    }


def speeds(records: list[dict[str, Any]]) -> tuple[float, float]:
    """Frames a second at the start, after the warm-up, and at the end."""
    times = np.array([record["time"] for record in records])
    steps = np.array([record["step"] for record in records])
    begin = times[0] + (times[-1] - times[0]) * WARM_UP
    width = (times[-1] - begin) * ENDS
    found = []
    for low, high in ((begin, begin + width), (times[-1] - width, times[-1])):
        within = np.flatnonzero((times >= low) & (times <= high))
        if len(within) < 2:
            return math.nan, math.nan
        a, b = within[0], within[-1]
        found.append(float((steps[b] - steps[a]) / (times[b] - times[a])))
    return found[0], found[1]


def drift(records: list[dict[str, Any]]) -> float:
    """By how many frames counters disagree in the worst record: collected against the others."""
    names = ("delivered", "dropped", "in_flight")
    return max(
        abs(record["collector/collected"] - sum(record[f"collector/{name}"] for name in names))
        for record in records
        if "collector/collected" in record
    )


def show(run: Soak, found: dict[str, Any]) -> None:
    """As a table."""
    table = Table(title=f"{run.algo}: {run.minutes:g} minutes, {run.kills} workers killed")
    for column in ("", "after warm-up", "at the end", "slope an hour", "95 % interval"):
        table.add_column(column, justify="right")
    for name in SLOPES:
        line = found["slopes_per_hour"][name]
        table.add_row(
            name,
            f"{found['first'][name]:.1f}",
            f"{found['last'][name]:.1f}",
            f"{line['value']:+.2f}",
            f"{line['low']:+.2f} to {line['high']:+.2f}",
        )
    console = Console(width=110)
    console.print(table)
    change = found["fps_last"] / found["fps_first"] - 1
    console.print(
        f"frames a second: {found['fps_first']:.0f} first, {found['fps_last']:.0f} last "
        f"({change:+.1%}); counters apart by {found['drift']:.0f} frames at most; "
        f"ended with status {found['exit_status']}, {found['state']}"
    )
