"""Every number of a report as CSV, in full: what the page rounds and the figures draw.

A table is a sequence of rows, of which the first names the columns.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence

from harness.report.curves import Band
from harness.report.findings import Cell, Findings, Result, every_score, totals
from harness.report.read_runs import Run

# What a spreadsheet takes for a formula; the wide forms are those of East Asian keyboards.
FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")

Row = Sequence[str | float | int | None]


def files(
    found: Sequence[Findings], runs: Sequence[Run], cells: Sequence[Cell] = ()
) -> dict[str, str]:
    """File name → its content."""
    tables = {
        "runs": _runs(found, runs),
        "options": _options(runs),
        "results": results(found),
        "comparisons": _comparisons(found),
        "interactions": _interactions(found),
        "totals": _totals(found),
        "curves": _curves(found),
        "profiles": _profiles(found),
    }
    if cells:
        tables["response"] = _response(cells)
    return {f"{name}.csv": _csv(rows) for name, rows in tables.items()}


def _csv(rows: Iterable[Row]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([cell_text(c) for c in row] for row in rows)
    return stream.getvalue()


def cell_text(cell: str | float | int | None) -> str:
    """Numbers in full and nothing for NaN; text that no spreadsheet takes for a formula."""
    if cell is None:
        return ""
    if isinstance(cell, int):
        return str(cell)
    if not isinstance(cell, str):
        return repr(float(cell)) if math.isfinite(cell) else ""
    text = cell.encode(errors="replace").decode()
    return f"'{text}" if text.lstrip().startswith(FORMULA) or text[:1].isspace() else text


def _runs(found: Sequence[Findings], runs: Sequence[Run]) -> Iterator[Row]:
    names = sorted({name for run in runs for name in run.summary})
    yield ["run", "task", "setting", "seed", "state", "counted", "error", "problems", *names]
    places = {id(run): (f, r) for f, r in _all(found) for run in r.setting.runs}
    for run in runs:
        task, setting, counted = "", "", False
        if id(run) in places:
            findings, result = places[id(run)]
            task, setting = findings.task.name, result.label
            counted = any(run is done for done in result.runs)
        seed = None if run.seed is None else str(run.seed)
        text = [run.name, task, setting, seed, run.state, str(counted), run.error]
        yield [*text, "; ".join(run.problems), *(run.summary.get(name) for name in names)]


def _options(runs: Sequence[Run]) -> Iterator[Row]:
    yield ["run", "option", "value"]
    for run in runs:
        yield from ([run.name, key, str(value)] for key, value in run.options.items())


def results(found: Sequence[Findings]) -> Iterator[Row]:
    """The estimates of every setting's score."""
    yield ["task", "setting", "metric", "measure", "value", "low", "high", "seeds"]
    for f, r in _all(every_score(found)):
        for measure, e in r.estimates.items():
            yield [f.task.name, r.label, f.score, measure, e.value, e.low, e.high, e.num_seeds]


def _comparisons(found: Sequence[Findings]) -> Iterator[Row]:
    yield [
        *("task", "metric", "setting", "baseline", "pairs", "difference", "low", "high"),
        *("p", "p_corrected", "margin", "p_equivalent", "p_equivalent_corrected", "verdict"),
        *("p_better", "p_better_low", "p_better_high", "finding"),
    ]
    for f in every_score(found):
        for c in f.comparisons:
            d, better = c.difference, f.improvements.get(c.name)
            yield [
                *(f.task.name, f.score, c.name, c.baseline, d.num_seeds, d.value, d.low, d.high),
                *(c.p, c.p_adjusted),
                *(c.margin, c.p_equivalent, c.p_equivalent_adjusted, c.verdict()),
                *((better.value, better.low, better.high) if better else (None, None, None)),
                c.sentence(),
            ]


def _interactions(found: Sequence[Findings]) -> Iterator[Row]:
    yield [
        *("task", "metric", "change", "at", "base", "rest", "seeds", "effect", "base_effect"),
        *("difference", "low", "high", "p", "p_corrected", "finding"),
    ]
    for f in every_score(found):
        for i in f.interactions:
            d = i.difference
            yield [
                *(f.task.name, f.score, i.change, i.at, i.base, i.rest, d.num_seeds),
                *(i.effect, i.base_effect, d.value, d.low, d.high, i.p, i.p_adjusted),
                i.sentence(),
            ]


def _response(cells: Sequence[Cell]) -> Iterator[Row]:
    if (design := cells[0].findings.design) is None:
        return
    factors = (" + ".join(factor) for factor in (design.facet, design.hue, design.x))
    yield ["metric", *factors, "setting", "mean", "low", "high", "seeds", "verdict"]
    for cell in cells:
        mean, verdict = cell.mean, cell.comparison.verdict() if cell.comparison else None
        yield [
            *(cell.findings.score, cell.panel, cell.line, cell.x, cell.result.label),
            *(mean.value, mean.low, mean.high, mean.num_seeds, verdict),
        ]


def _totals(found: Sequence[Findings]) -> Iterator[Row]:
    yield ["setting", "baseline", "tasks", "p_better", "low", "high", "seeds"]
    for label, e in totals(found).items():
        yield [label, found[0].baseline, len(found), e.value, e.low, e.high, e.num_seeds]


def _curves(found: Sequence[Findings]) -> Iterator[Row]:
    yield ["task", "metric", "setting", "axis", "x", "value", "low", "high", "seeds"]
    for f, r in _all(found):
        for axis, band in r.curves.items():
            yield from ([f.task.name, f.curve, r.label, axis, *point] for point in _points(band))


def _profiles(found: Sequence[Findings]) -> Iterator[Row]:
    yield ["task", "metric", "setting", "threshold", "share", "low", "high", "seeds"]
    for f, r in _all(found):
        yield from ([f.task.name, f.score, r.label, *point] for point in _points(r.profile))


def _points(band: Band | None) -> Iterator[Row]:
    if band is None:
        return
    for x, value, low, high in zip(band.grid, band.value, band.low, band.high, strict=True):
        if math.isfinite(value):
            yield [x, value, low, high, band.num_seeds]


def _all(found: Iterable[Findings]) -> Iterator[tuple[Findings, Result]]:
    return ((findings, result) for findings in found for result in findings.results)
