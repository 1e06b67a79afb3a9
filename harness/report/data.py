"""Every number of a report as CSV: what a table rounds and a figure draws, in full."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from harness.analysis.statistics import Band
from harness.metrics import PHASES
from harness.report.analysis import Findings
from harness.report.read import Run
from harness.report.totals import totals

# What a spreadsheet takes for a formula; the wide forms are those of East Asian keyboards.
FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")

Cell = str | float | int | None


def files(found: Sequence[Findings], runs: Sequence[Run]) -> dict[str, str]:
    """File name → its content."""
    return {
        "runs.csv": _runs(found, runs),
        "options.csv": _csv(
            ["run", "option", "value"],
            ([run.name, key, str(value)] for run in runs for key, value in run.options.items()),
        ),
        "results.csv": _csv(*results(found)),
        "comparisons.csv": _csv(
            [
                *("task", "metric", "setting", "baseline", "pairs", "difference", "low", "high"),
                *("p", "p_corrected", "p_better", "p_better_low", "p_better_high", "finding"),
            ],
            _comparisons(found),
        ),
        "totals.csv": _csv(
            ["setting", "baseline", "tasks", "p_better", "low", "high", "seeds"],
            (
                [t.name, t.baseline, t.num_tasks, e.value, e.low, e.high, e.num_seeds]
                for t in totals(found)
                for e in [t.better]
            ),
        ),
        "curves.csv": _csv(
            ["task", "metric", "setting", "axis", "x", "value", "low", "high", "seeds"],
            _curves(found),
        ),
        "profiles.csv": _csv(
            ["task", "metric", "setting", "threshold", "share", "low", "high", "seeds"],
            _profiles(found),
        ),
        "distributions.csv": _csv(
            ["task", "setting", "metric", "percentile", "value"], _distributions(found)
        ),
        "time.csv": _csv(
            ["task", "setting", "phase", "seconds_per_1000_frames"],
            (
                [f.task.name, r.label, phase, r.seconds_per_1000_frames(phase)]
                for f in found
                for r in f.results
                for phase in (*PHASES, "other")
            ),
        ),
    }


def results(found: Sequence[Findings]) -> tuple[list[str], list[list[Cell]]]:
    """The columns and rows of the table of results."""
    columns = ["task", "setting", "metric", "measure", "value", "low", "high", "seeds"]
    return columns, list(_estimates(found))


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([_cell(column) for column in columns])
    writer.writerows([_cell(cell) for cell in row] for row in rows)
    return stream.getvalue()


def _cell(cell: Cell) -> str:
    """Numbers in full and nothing for NaN; text that no spreadsheet takes for a formula."""
    if cell is None:
        return ""
    if isinstance(cell, int):
        return str(cell)
    if not isinstance(cell, str):
        return repr(float(cell)) if math.isfinite(cell) else ""
    text = cell.encode(errors="replace").decode()
    return f"'{text}" if text.lstrip().startswith(FORMULA) or text[:1].isspace() else text


def _runs(found: Sequence[Findings], runs: Sequence[Run]) -> str:
    places = {
        id(run): (f.task.name, r.label, run in r.setting.done.values())
        for f in found
        for r in f.results
        for run in r.setting.runs
    }
    names = sorted({name for run in runs for name in run.summary})
    rows = []
    for run in runs:
        task, setting, counted = places.get(id(run), ("", "", False))
        seed = None if run.seed is None else str(run.seed)
        said = [run.error, "; ".join(run.problems)]
        numbers = [run.summary.get(name) for name in names]
        rows.append([run.name, task, setting, seed, run.state, str(counted), *said, *numbers])
    columns = ["run", "task", "setting", "seed", "state", "counted", "error", "problems", *names]
    return _csv(columns, rows)


def _scored(found: Sequence[Findings]) -> Iterator[Findings]:
    for f in found:
        yield f
        if f.throughout is not None:
            yield f.throughout


def _estimates(found: Sequence[Findings]) -> Iterator[list[Cell]]:
    for f in _scored(found):
        for r in f.results:
            for measure, e in r.estimates.items():
                yield [f.task.name, r.label, f.score, measure, e.value, e.low, e.high, e.num_seeds]


def _comparisons(found: Sequence[Findings]) -> Iterator[list[Cell]]:
    for f in _scored(found):
        for c in f.comparisons:
            d, better = c.difference, f.improvements.get(c.name)
            chance = [better.value, better.low, better.high] if better else [None] * 3
            yield [
                *(f.task.name, f.score, c.name, c.baseline, d.num_seeds, d.value, d.low, d.high),
                *(c.p, c.p_adjusted, *chance, c.sentence()),
            ]


def _curves(found: Sequence[Findings]) -> Iterator[list[Cell]]:
    for f in found:
        for r in f.results:
            for axis, band in (("frames", r.by_frames), ("seconds", r.by_seconds)):
                for point in _points(band):
                    yield [f.task.name, f.curve, r.label, axis, *point]


def _points(band: Band | None) -> Iterator[list[Cell]]:
    if band is None:
        return
    for x, value, low, high in zip(band.grid, band.value, band.low, band.high, strict=True):
        if math.isfinite(value):
            yield [x, value, low, high, band.num_seeds]


def _profiles(found: Sequence[Findings]) -> Iterator[list[Cell]]:
    for f in found:
        for r in f.results:
            if (p := r.profile) is None:
                continue
            for row in zip(p.thresholds, p.share, p.low, p.high, strict=True):
                yield [f.task.name, f.score, r.label, *row, p.num_seeds]


def _distributions(found: Sequence[Findings]) -> Iterator[list[Cell]]:
    for f in found:
        for r in f.results:
            drawn = {f"sync/{name}_ms": values for name, values in r.latencies.items()}
            if r.lags is not None:
                drawn["policy/lag_mean"] = r.lags
            for metric, values in drawn.items():
                shares = np.linspace(0, 100, len(values))
                for share, value in zip(shares, values, strict=True):
                    yield [f.task.name, r.label, metric, share, value]
