"""Every number of a report as CSV, in full: what the page rounds and the figures draw."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import pandas as pd

from harness.report.comparisons import COMPARISONS, INTERACTIONS
from harness.report.design import Design
from harness.report.scores import CURVES, Report, summaries

# What a spreadsheet takes for a formula; the wide forms are those of East Asian keyboards.
FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def files(report: Report) -> dict[str, str]:
    """File name → its content."""
    tables = {
        "runs": _runs(report),
        "options": _options(report.plan.runs),
        "results": results(report),
        "comparisons": _by_score(report, "comparisons", COMPARISONS),
        "interactions": _by_score(report, "interactions", INTERACTIONS),
        "curves": report.curves[CURVES],
    }
    if report.design is not None and len(report.response):
        tables["response"] = _response(report.design, report.response)
    return {f"{name}.csv": _csv(table) for name, table in tables.items()}


def _csv(table: pd.DataFrame) -> str:
    stream = io.StringIO()
    rows = [list(table.columns), *table.itertuples(index=False, name=None)]
    csv.writer(stream, lineterminator="\n").writerows(map(cell_text, row) for row in rows)
    return stream.getvalue()


def cell_text(cell: Any) -> str:
    """Numbers in full and nothing for NaN; text that no spreadsheet takes for a formula."""
    if cell is None:
        return ""
    if isinstance(cell, int):
        return str(cell)
    if not isinstance(cell, str):
        return repr(float(cell)) if math.isfinite(cell) else ""
    text = cell.encode(errors="replace").decode()
    return f"'{text}" if text.lstrip().startswith(FORMULA) or text[:1].isspace() else text


def _runs(report: Report) -> pd.DataFrame:
    runs = report.plan.runs
    numbers = summaries(runs)
    columns = {"name": "run", "task": "task", "setting": "setting", "seed": "seed"}
    columns |= {"state": "state", "counts": "counted", "error": "error", "problems": "problems"}
    table = runs[list(columns)].assign(
        seed=[None if seed is None else str(seed) for seed in runs["seed"]],
        counts=runs["counts"].map(str),
        problems=runs["problems"].map("; ".join),
    )
    return table.rename(columns=columns).join(numbers[sorted(numbers)])


def _options(runs: pd.DataFrame) -> pd.DataFrame:
    rows = [
        (name, option, str(value))
        for name, options in zip(runs["name"], runs["options"], strict=True)
        for option, value in options.items()
    ]
    return pd.DataFrame(rows, columns=["run", "option", "value"], dtype=object)


def results(report: Report) -> pd.DataFrame:
    """The estimates of every setting's scores."""
    rows = [
        (score.task, setting, score.metric, measure, *estimate)
        for score in report.scores
        for (setting, measure), estimate in score.estimates.items()
    ]
    columns = ["task", "setting", "metric", "measure", "value", "low", "high", "seeds"]
    return pd.DataFrame(rows, columns=columns)


def _by_score(report: Report, kind: str, columns: list[str]) -> pd.DataFrame:
    """The comparisons or the interactions of every score."""
    tables = [
        getattr(score, kind).assign(task=score.task, metric=score.metric)
        for score in report.scores
        if len(getattr(score, kind))
    ]
    columns = ["task", "metric", *columns]
    return pd.concat(tables)[columns] if tables else pd.DataFrame(columns=columns)


def _response(design: Design, cells: pd.DataFrame) -> pd.DataFrame:
    columns = {"panel": design.facet, "line": design.hue, "x": design.x}
    table = cells[["metric", *columns, "setting", "value", "low", "high", "seeds", "verdict"]]
    names = {column: " + ".join(factor) for column, factor in columns.items()}
    return table.rename(columns={**names, "value": "mean"})
