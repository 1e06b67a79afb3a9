"""The runs of the tables, one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.report import runs
from harness.report.runs import COLUMNS, Tables, read_runs

VIRTUAL_TIME = "sim/time_s"


@dataclass
class Run:
    """A row of the runs, with its records."""

    name: str
    source: str
    state: str = "unknown"
    error: str = ""
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0))  # frames at each record
    metrics: dict[str, np.ndarray] = field(default_factory=dict)  # NaN where a record lacks it

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    def curve(self, name: str, over: str = "frames") -> tuple[np.ndarray, np.ndarray]:
        """The records that have this metric: their frames or seconds, and the values.

        "virtual seconds" are those of a simulated cluster; other runs have none.
        """
        if over == "virtual seconds":
            x = self.metrics.get(VIRTUAL_TIME, np.full(len(self.steps), np.nan))
        else:
            x = self.steps if over == "frames" else self.seconds()
        values = self.metrics.get(name, np.full(len(x), np.nan))
        finite = np.isfinite(x) & np.isfinite(values)
        return x[finite], values[finite]

    def seconds(self) -> np.ndarray:
        """The time in the learner's loop up to each record, without start-up and pauses."""
        phases = [values for name, values in self.metrics.items() if name.startswith("time/")]
        if phases:
            return np.cumsum(np.nansum(phases, axis=0))
        times = self.metrics.get("time", np.full(len(self.steps), np.nan))
        return times - times[0] if len(times) else times


def find_runs(
    places: Sequence[Path], wanted: Collection[str], imported: Sequence[runs.Run] = ()
) -> list[Run]:
    """All runs in the directories named, and imported ones."""
    return runs_of(read_runs(places, wanted, imported))


def runs_of(tables: Tables) -> list[Run]:
    """Every run."""
    by_run = dict(iter(tables.records.groupby("run")))
    rows = []
    for number, row in tables.runs.iterrows():
        summary = row.filter(regex=r"^summary\.").dropna()
        numbers = {key.removeprefix("summary."): value for key, value in summary.items()}
        run = Run(**{key: row[key] for key in COLUMNS}, summary=numbers)
        if number in by_run:
            records = by_run[number].drop(columns="run").dropna(axis=1, how="all")
            run.steps = records.pop("step").to_numpy()
            run.metrics = {name: values.to_numpy() for name, values in records.items()}
        rows.append(run)
    return rows
