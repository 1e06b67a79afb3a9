"""The figures of one task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from harness.analysis.drawing import (
    FILLS,
    draw_band,
    in_rows,
    looks,
    short,
    with_legend,
)
from harness.analysis.factor_figures import MOST_BANDS, by_factors
from harness.analysis.findings import Findings, Result
from harness.analysis.statistics import student

MOST_SHADED = 6  # curves with bands; of more the bands would cover the curves


# -- learning


def curves_by_frames(findings: Findings) -> Figure | None:
    """The course of learning over frames: what the data were worth."""
    return _curves(findings, "frames", "frames")


def curves_by_seconds(findings: Findings) -> Figure | None:
    """The course of learning over seconds: what waiting cost."""
    return _curves(findings, "seconds", "seconds in the learner's loop")


def curves_by_virtual_seconds(findings: Findings) -> Figure | None:
    """The course of learning over the clock of a simulated cluster."""
    return _curves(findings, "virtual seconds", "seconds of the simulated cluster")


def _curves(findings: Findings, axis: str, xlabel: str) -> Figure | None:
    drawn = [result for result in findings.results if axis in result.curves]
    if not drawn:
        return None
    if findings.design is not None:
        bands = {result.label: result.curves[axis] for result in drawn}
        return by_factors(findings, findings.design, bands, xlabel, findings.curve)
    figure = with_legend(findings, drawn, 3.4)
    axes = figure.add_subplot()
    styles = looks(findings)
    for result in drawn:
        shade = len(drawn) <= MOST_SHADED
        draw_band(axes, result.curves[axis], styles[result.label], shade=shade)
    axes.set(xlabel=xlabel, ylabel=findings.curve)
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


def profiles(findings: Findings) -> Figure | None:
    """The share of runs above each score."""
    drawn = {r.label: r.profile for r in findings.results if r.profile is not None}
    if not drawn:
        return None
    if findings.design is not None:
        above, share = f"{findings.score} above", "share of runs"
        return by_factors(findings, findings.design, drawn, above, share, steps=True)
    figure = with_legend(findings, [r for r in findings.results if r.label in drawn], 3.2)
    axes = figure.add_subplot()
    styles = looks(findings)
    for label, profile in drawn.items():
        draw_band(axes, profile, styles[label], steps=True, shade=len(drawn) <= MOST_BANDS)
    axes.set(xlabel=f"{findings.score} above", ylabel="share of runs", ylim=(-0.02, 1.02))
    axes.ticklabel_format(axis="x", useOffset=False)
    low, high = axes.get_xlim()
    if (least := 0.04 * abs(low + high) / 2) > high - low:  # all runs score alike
        axes.set_xlim(low - least / 2, high + least / 2)
    return figure


# -- throughput


def throughput(findings: Findings) -> Figure | None:
    """Frames a second against lag: a point for each run, a larger one for the medians."""
    drawn = [result for result in findings.results if len(_points(result))]
    if not drawn:
        return None
    figure = with_legend(findings, drawn, 3.2, markers=True)
    axes = figure.add_subplot()
    styles = looks(findings)
    for result in drawn:
        points, look = _points(result), styles[result.label]
        style: dict[str, Any] = {"color": look["color"], "fillstyle": FILLS[look["linestyle"]]}
        axes.plot(*points.T, "o", alpha=0.5, markersize=5, **style)
        axes.plot(*np.median(points, axis=0), "D", markersize=9, **style)
    axes.set(xlabel="mean lag (versions)", ylabel="frames a second")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # room for the marker at the top
    axes.margins(x=0.05)
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    return figure


def _points(result: Result) -> np.ndarray:
    known = [r.summary for r in result.runs if {"policy/lag_mean", "fps"} <= r.summary.keys()]
    return np.array([[summary["policy/lag_mean"], summary["fps"]] for summary in known])
