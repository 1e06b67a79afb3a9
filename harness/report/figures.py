"""The figures of a report: `FIGURES` lists them, with the section that shows each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from harness.report import drawing
from harness.report.drawing import (
    FILLS,
    MOST_LETTERS,
    Key,
    draw_band,
    in_rows,
    is_narrow,
    legend_of,
    line_look,
    looks,
    panels,
    shades,
    short,
    shown,
)
from harness.report.pages import Picture
from harness.report.scores import CURVE_WORDS, EVALUATED, SAMPLED, TRAINED, WORDS, Report
from harness.report.statistics import student
from harness.report.text import joined

MOST_SHADED = 6  # curves with bands; of more the bands would cover the curves
MOST_BESIDE = 3  # the same of panels that stand beside others
OCTAVES = 3  # numbers that span more are spaced by their logarithm

LAG = "sync.lag"
SHORT = {
    EVALUATED: "newest weights, greedy",
    SAMPLED: "newest weights, sampled",
    TRAINED: "acting weights",
}
LABELS = {
    "frames": "frames",
    "seconds": "seconds in the learner's loop",
    "virtual seconds": "seconds of the simulated cluster",
}


# -- curves


def curves(report: Report, task: str, axis: str) -> Figure | None:
    """The course of learning over one of the axes."""
    bands = report.curves[(report.curves["task"] == task) & (report.curves["axis"] == axis)]
    return _bands(report, task, bands, axis) if len(bands) else None


def returns(report: Report, task: str) -> Figure | None:
    """The three returns of one setting, over frames."""
    bands = report.returns[report.returns["task"] == task]
    if bands.empty:
        return None
    key = [
        (SHORT[metric], line_look(number) | {"marker": ""})
        for number, metric in enumerate(bands["metric"].unique())
    ]
    figure, (axes,) = panels([""], 3.0, "frames", "return", key)
    for (_, look), (_, one) in zip(key, bands.groupby("metric", sort=False), strict=True):
        draw_band(axes, one, look)
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    return figure


def _bands(report: Report, task: str, bands: pd.DataFrame, axis: str) -> Figure:
    """A band for each setting, in one panel.

    With a design there is a panel for each of its lines, in which colour is the place on its x
    axis.
    """
    groups: dict[str, list[str]] = {}  # title of a panel → settings
    by_setting = dict(iter(bands.groupby("setting", sort=False)))
    design, title, key = report.design, "", Key()
    if design is None:
        groups[""] = list(by_setting)
        styles = looks(report, report.final(task))
        key = legend_of(report, report.final(task), groups[""])
    else:
        colours = dict(zip(design.values, shades(len(design.values)), strict=True))
        title = " + ".join(design.x)
        key = [(value, {"color": colour}) for value, colour in colours.items()]
        styles = {}
        for place in design.places.loc[task].loc[list(by_setting)].itertuples():
            styles[place.Index] = {"color": colours[place.x]}
            panel = " · ".join(filter(None, (place.panel, place.line)))
            groups.setdefault(panel, []).append(place.Index)
    height, most = (3.0, MOST_SHADED) if len(groups) == 1 else (2.0, MOST_BESIDE)
    words = CURVE_WORDS[bands["metric"].iloc[0]]
    figure, grid = panels(list(groups), height, LABELS[axis], words, key, key_title=title)
    for axes, labels in zip(grid, groups.values(), strict=True):
        for label in labels:
            draw_band(axes, by_setting[label], styles[label], shade=len(labels) <= most)
        axes.xaxis.set_major_formatter(FuncFormatter(short))
    return figure


# -- scores


def scores(report: Report) -> Figure | None:
    """Every seed's score, with the mean and its interval; tasks below each other."""
    drawn = [score for score in report.primary if score.scored]
    if not drawn:
        return None
    figure, panels = in_rows([score.scored for score in drawn])
    for axes, score in zip(panels, drawn, strict=True):
        styles = looks(report, score)
        for place, setting in enumerate(score.scored):
            colour, values = styles[setting]["color"], score.of(setting)
            axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.45, markersize=5)
            mean = student(values)
            if mean.has_interval:
                axes.plot([mean.low, mean.high], [place + 0.25] * 2, color=colour, linewidth=2.5)
            axes.plot([mean.value], [place + 0.25], "D", color=colour, markersize=6)
        if score.target is not None:
            axes.axvline(score.target, color="#999999", linestyle="--", linewidth=1)
        axes.set(xlabel=score.words)
        if len(drawn) > 1:
            axes.set_title(score.task, fontsize=10, loc="left")
    return figure


def response(report: Report) -> Figure | None:
    """A score over a factor: a line for each value of the hue, a panel for each of the facet.

    Over categories, points are not joined.
    """
    cells = report.response
    if report.design is None or cells.empty:
        return None
    design, titles = report.design, list(cells["panel"].unique())
    alone = len(titles) == 1
    joined: dict[str, Any] = {} if are_numbers(design.values) else {"linestyle": "none"}
    styles = [line_look(n) | {"markersize": 4.5} | joined for n in range(len(design.lines))]
    figure, grid = panels(
        titles,
        3.0 if alone else 2.4,
        axis_name(report),
        WORDS.get(cells["metric"].iloc[0], cells["metric"].iloc[0]),
        list(zip(design.lines, styles, strict=True)) if len(design.lines) > 1 else [],
        key_title=" + ".join(design.hue),
        share=cells["task"].nunique() == 1,
    )
    at = positions(design.values)
    # Lines stand beside each other over categories, so that their intervals can be seen; over
    # numbers they hardly move, since a point at another place would be another number.
    apart = 0.01 * (max(at) - min(at)) if are_numbers(design.values) else 0.4
    spread = apart / max(len(design.lines), 5)
    ticks = [shown(value) for value in design.values]
    slanted = sum(map(len, ticks)) > MOST_LETTERS * (2 if alone and not is_narrow() else 1)
    how: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    for axes, title in zip(grid, titles, strict=True):
        inside = cells[cells["panel"] == title]
        _draw_margin(axes, report, inside)
        for number, line in enumerate(design.lines):
            shift = spread * (number - (len(design.lines) - 1) / 2)
            points = inside[inside["line"] == line]
            points = points.sort_values(
                "x", key=lambda x: x.map(design.values.index), kind="stable"
            )
            if len(points):
                bars = [points["value"] - points["low"], points["high"] - points["value"]]
                axes.errorbar(
                    [at[design.values.index(x)] + shift for x in points["x"]],
                    points["value"],
                    yerr=np.nan_to_num(bars),
                    capsize=2,
                    elinewidth=1.1,
                    **styles[number],
                )
        axes.set_xticks(at, ticks, fontsize=9, **(how if slanted else {}))
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(FuncFormatter(short))
    return figure


def axis_name(report: Report) -> str:
    """The options on the x axis; a lag with how many gradient steps an update of its runs has."""
    assert report.design is not None
    name = " + ".join(report.design.x)
    runs = report.plan.runs[report.plan.runs["counts"]]
    counts = runs.reindex(columns=["summary.gradient_steps", "summary.updates"]).dropna()
    counts = counts[(counts > 0).all(axis=1)]
    if LAG not in report.design.x or counts.empty:
        return name
    steps = (counts["summary.gradient_steps"] / counts["summary.updates"]).round().astype(int)
    least, most = steps.min(), steps.max()
    span = f"{least}" if least == most else f"{least} to {most}"
    return f"{name}\n(updates of {span} gradient steps)"


def _draw_margin(axes: Axes, report: Report, cells: pd.DataFrame) -> None:
    """The differences that count as none, if all settings of a panel have one baseline."""
    score, *others = (one for one in report.primary if one.task in set(cells["task"]))
    compared = score.comparisons[score.comparisons["setting"].isin(cells["setting"])]
    if others or compared["baseline"].nunique() != 1:
        return
    middle = float(np.mean(score.of(compared["baseline"].iloc[0])))
    margin = compared["margin"].iloc[0]
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


def throughput(report: Report, task: str) -> Figure | None:
    """Frames a second against lag: a point for each run, a larger one for the medians."""
    columns = ["summary.policy/lag_mean", "summary.fps"]
    runs = report.plan.counted(task).reindex(columns=["setting", *columns]).dropna()
    if runs.empty:
        return None
    score, marker = report.final(task), {"marker": "D", "linestyle": ""}
    groups = dict(iter(runs.groupby("setting", sort=False)))
    key = [
        (name, look | marker | {"fillstyle": FILLS[look["linestyle"]]})
        for name, look in legend_of(report, score, list(groups))
    ]
    figure, (axes,) = panels([""], 2.8, "mean lag (versions)", "frames a second", key)
    styles = looks(report, score)
    for setting, group in groups.items():
        points, look = group[columns].to_numpy(), styles[setting]
        style: dict[str, Any] = {"color": look["color"], "fillstyle": FILLS[look["linestyle"]]}
        axes.plot(*points.T, "o", alpha=0.5, markersize=5, **style)
        axes.plot(*np.median(points, axis=0), "D", markersize=9, **style)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # room for the marker at the top
    axes.margins(x=0.05)
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    return figure


# -- all of them


class Entry(NamedTuple):
    """A figure of a report.

    section    where it stands; `Learning by frames` opens the report if nothing is compared
    caption    of (report, task)
    plot       the same; None if it would show nothing. The task is "" in the verdict
    """

    section: str
    slug: str
    caption: Callable[[Report, str], str]
    plot: Callable[[Report, str], Figure | None]


def of_section(section: str, report: Report, task: str = "") -> Iterator[Picture | None]:
    """Draw the figures of one section."""
    several = task and len(report.plan.tasks) > 1
    suffix = f"-{report.plan.tasks.index(task) + 1}" if several else ""
    for entry in FIGURES:
        if entry.section == section:
            plot = partial(entry.plot, report, task)
            names = report.plan.labels(task) if task else ()
            yield drawing.draw(plot, entry.slug + suffix, entry.caption(report, task), names)


def _words(report: Report) -> str:
    """What the scores of the verdict are."""
    return joined(dict.fromkeys(score.words for score in report.primary)).capitalize()


def _about_curves(report: Report, task: str) -> str:
    metrics = report.curves["metric"][report.curves["task"] == task]
    metric = metrics.iloc[0] if len(metrics) else TRAINED
    smooth = " Each point looks back on 5 % of the run." if metric == TRAINED else ""
    return (
        f"the {CURVE_WORDS[metric]}, the mean over seeds with a 95 % bootstrap band. A line ends "
        f"where the first of its runs ends.{smooth}"
    )


def _about_frames(report: Report, task: str) -> str:
    if task not in set(report.returns["task"]):
        return f"By frames: {_about_curves(report, task)}"
    return (
        "The returns of a run as it learns; of several seeds the mean with a 95 % bootstrap band. "
        "The newest weights are evaluated, greedy and sampled. The acting weights are older, and "
        "sample their actions."
    )


def _about_response(report: Report, _: str) -> str:
    has_band = any(score.baseline for score in report.primary)
    band = " The grey band is the margin about the baseline." if has_band else ""
    return f"{_words(report)}: means over seeds with Student's 95 % intervals.{band}"


FIGURES = [
    Entry(
        "Verdict",
        "scores",
        lambda report, _: (
            f"{_words(report)}: a dot for each seed; below them the mean and its 95 % interval."
        ),
        lambda report, _: None if report.design else scores(report),
    ),
    Entry("Verdict", "response", _about_response, lambda report, _: response(report)),
    Entry(
        "Learning by frames",
        "learning-frames",
        _about_frames,
        lambda report, task: returns(report, task) or curves(report, task, "frames"),
    ),
    Entry(
        "Learning",
        "learning-seconds",
        lambda report, task: f"By wall time, without start-up: {_about_curves(report, task)}",
        lambda report, task: curves(report, task, "seconds"),
    ),
    Entry(
        "Learning",
        "learning-virtual-seconds",
        lambda report, task: (
            f"By the clock of the simulated cluster: {_about_curves(report, task)}"
        ),
        lambda report, task: curves(report, task, "virtual seconds"),
    ),
    Entry(
        "Throughput and time",
        "throughput",
        lambda *_: (
            "Throughput against staleness: a dot for each run, a diamond for the medians of "
            "a setting. Fast and fresh is the upper left."
        ),
        throughput,
    ),
]
