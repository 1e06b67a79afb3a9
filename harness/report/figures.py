"""The figures of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from harness.report.curves import Band
from harness.report.drawing import (
    FILLS,
    MOST_LETTERS,
    Key,
    draw_band,
    in_rows,
    legend_of,
    line_look,
    looks,
    panels,
    shades,
    short,
    shown,
)
from harness.report.findings import Cell, Findings, Result
from harness.report.statistics import student

MOST_SHADED = 6  # curves with bands; of more the bands would cover the curves
MOST_STEPS = 3  # the same of profiles, and of panels that stand beside others
OCTAVES = 3  # numbers that span more are spaced by their logarithm


# -- curves


def curves(findings: Findings, axis: str, xlabel: str) -> Figure | None:
    """The course of learning over one of the axes of `Run.curve`."""
    bands = {r.label: r.curves[axis] for r in findings.results if axis in r.curves}
    return _bands(findings, bands, xlabel, findings.curve) if bands else None


curves_by_frames = partial(curves, axis="frames", xlabel="frames")
curves_by_seconds = partial(curves, axis="seconds", xlabel="seconds in the learner's loop")
curves_by_virtual_seconds = partial(
    curves, axis="virtual seconds", xlabel="seconds of the simulated cluster"
)


def profiles(findings: Findings) -> Figure | None:
    """The share of runs above each score."""
    bands = {r.label: r.profile for r in findings.results if r.profile is not None}
    if not bands:
        return None
    figure = _bands(findings, bands, f"{findings.score} above", "share of runs", steps=True)
    axes = figure.axes[0]
    axes.set_ylim(-0.02, 1.02)
    low, high = axes.get_xlim()
    if (least := 0.04 * abs(low + high) / 2) > high - low:  # all runs score alike
        axes.set_xlim(low - least / 2, high + least / 2)
    return figure


def _bands(
    findings: Findings, bands: Mapping[str, Band], xlabel: str, ylabel: str, *, steps: bool = False
) -> Figure:
    """A band for each setting, in one panel.

    With a design there is a panel for each of its lines, in which colour is the place on its x
    axis.
    """
    groups: dict[str, list[str]] = {}  # title of a panel → settings
    design, title, key = findings.design, "", Key()
    if design is None:
        groups[""] = list(bands)
        styles = looks(findings)
        key = legend_of(findings, [findings.result(label) for label in bands])
    else:
        colours = dict(zip(design.values, shades(len(design.values)), strict=True))
        places = {label: design.place(findings.result(label).setting) for label in bands}
        styles = {label: {"color": colours[place.x]} for label, place in places.items()}
        title = " + ".join(design.x)
        key = [(value, {"color": colour}) for value, colour in colours.items()]
        for label, place in places.items():
            groups.setdefault(" · ".join(filter(None, (place.panel, place.line))), []).append(label)
    height, most = (3.0, MOST_SHADED) if len(groups) == 1 else (2.0, MOST_STEPS)
    figure, grid = panels(list(groups), height, xlabel, ylabel, key, key_title=title)
    for axes, labels in zip(grid, groups.values(), strict=True):
        shade = len(labels) <= (MOST_STEPS if steps else most)
        for label in labels:
            draw_band(axes, bands[label], styles[label], steps=steps, shade=shade)
        axes.xaxis.set_major_formatter(FuncFormatter(short))
    return figure


# -- scores


def scores(found: Sequence[Findings]) -> Figure | None:
    """Every seed's score, with the mean and its interval; tasks below each other."""
    tasks = [(f, drawn) for f in found if (drawn := [r for r in f.results if r.scores])]
    if not tasks:
        return None
    figure, panels = in_rows([drawn for _, drawn in tasks])
    for axes, (findings, drawn) in zip(panels, tasks, strict=True):
        styles = looks(findings)
        for place, result in enumerate(drawn):
            colour = styles[result.label]["color"]
            values = list(result.scores.values())
            axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.45, markersize=5)
            mean = student(values)
            if mean.has_interval:
                axes.plot([mean.low, mean.high], [place + 0.25] * 2, color=colour, linewidth=2.5)
            axes.plot([mean.value], [place + 0.25], "D", color=colour, markersize=6)
        if findings.target is not None:
            axes.axvline(findings.target, color="#999999", linestyle="--", linewidth=1)
        axes.set(xlabel=findings.score)
        if len(tasks) > 1:
            axes.set_title(findings.task.name, fontsize=10, loc="left")
    return figure


def response(cells: Sequence[Cell]) -> Figure | None:
    """A score over a factor: a line for each value of the hue, a panel for each of the facet.

    Over categories, points are not joined.
    """
    if not cells or (design := cells[0].findings.design) is None:
        return None
    titles = list(dict.fromkeys(cell.panel for cell in cells))
    alone = len(titles) == 1
    joined: dict[str, Any] = {} if are_numbers(design.values) else {"linestyle": "none"}
    styles = [line_look(n) | {"markersize": 4.5} | joined for n in range(len(design.lines))]
    figure, grid = panels(
        titles,
        3.0 if alone else 2.4,
        " + ".join(design.x),
        cells[0].findings.score,
        list(zip(design.lines, styles, strict=True)) if len(design.lines) > 1 else [],
        key_title=" + ".join(design.hue),
        share=len({id(cell.findings) for cell in cells}) == 1,
    )
    at = positions(design.values)
    ticks = [shown(value) for value in design.values]
    slanted = sum(map(len, ticks)) > MOST_LETTERS * (2 if alone else 1)
    how: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    for axes, title in zip(grid, titles, strict=True):
        inside = [cell for cell in cells if cell.panel == title]
        _draw_margin(axes, inside)
        for number, line in enumerate(design.lines):
            # Lines stand beside each other, so that their intervals can be seen.
            shift = min(1.0, 4 / len(design.lines)) * (number - (len(design.lines) - 1) / 2)
            shift *= 0.09 * min(np.diff(sorted(at)), default=1.0)
            points = [
                (at[design.values.index(cell.x)] + shift, cell.mean)
                for cell in sorted(inside, key=lambda cell: design.values.index(cell.x))
                if cell.line == line
            ]
            if points:
                bars = [(m.value - m.low, m.high - m.value) for _, m in points]
                axes.errorbar(
                    [x for x, _ in points],
                    [m.value for _, m in points],
                    yerr=np.nan_to_num(bars).T,
                    capsize=2,
                    elinewidth=1.1,
                    **styles[number],
                )
        axes.set_xticks(at, ticks, fontsize=9, **(how if slanted else {}))
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(FuncFormatter(short))
    return figure


def _draw_margin(axes: Axes, cells: Sequence[Cell]) -> None:
    """The differences that count as none, if there is one baseline."""
    compared = [cell.comparison for cell in cells if cell.comparison is not None]
    baselines = {comparison.baseline for comparison in compared}
    if len(baselines) != 1 or len({id(cell.findings) for cell in cells}) != 1:
        return
    scores = cells[0].findings.result(baselines.pop()).scores
    middle, margin = float(np.mean(list(scores.values()))), compared[0].margin
    axes.axhline(middle, color="#999999", linewidth=0.8, linestyle="--", zorder=1)
    if math.isfinite(margin):
        axes.axhspan(middle - margin, middle + margin, color="#999999", alpha=0.15, linewidth=0)


def are_numbers(values: Sequence[str]) -> bool:
    """Whether all are finite numbers; otherwise they are categories."""
    try:
        return all(math.isfinite(float(value)) for value in values)
    except ValueError:
        return False


def positions(values: Sequence[str]) -> list[float]:
    """Where the values of x stand: by size, by the logarithm of it, or one after the other.

    On a logarithmic axis zero stands one step before the least, the smallest between two values.
    """
    if not are_numbers(values):
        return [float(place) for place in range(len(values))]
    numbers = [float(value) for value in values]
    positive = [number for number in numbers if number > 0]
    if min(numbers) < 0 or not positive or max(positive) < 2**OCTAVES * min(positive):
        return numbers
    logs = sorted({math.log2(number) for number in positive})
    zero = logs[0] - min(b - a for a, b in pairwise(logs))
    return [math.log2(number) if number else zero for number in numbers]


# -- throughput


def throughput(findings: Findings) -> Figure | None:
    """Frames a second against lag: a point for each run, a larger one for the medians."""
    drawn = [result for result in findings.results if len(_points(result))]
    if not drawn:
        return None
    marker = {"marker": "D", "linestyle": ""}
    key = [
        (name, look | marker | {"fillstyle": FILLS[look["linestyle"]]})
        for name, look in legend_of(findings, drawn)
    ]
    figure, (axes,) = panels([""], 2.8, "mean lag (versions)", "frames a second", key)
    styles = looks(findings)
    for result in drawn:
        points, look = _points(result), styles[result.label]
        style: dict[str, Any] = {"color": look["color"], "fillstyle": FILLS[look["linestyle"]]}
        axes.plot(*points.T, "o", alpha=0.5, markersize=5, **style)
        axes.plot(*np.median(points, axis=0), "D", markersize=9, **style)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # room for the marker at the top
    axes.margins(x=0.05)
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    return figure


def _points(result: Result) -> np.ndarray:
    known = [r.summary for r in result.runs if {"policy/lag_mean", "fps"} <= r.summary.keys()]
    return np.array([[summary["policy/lag_mean"], summary["fps"]] for summary in known])
