"""Figures over the factors of a sweep: an option on the x axis, lines by colour, panels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from harness.analysis.curves import Band
from harness.analysis.design import Design
from harness.analysis.drawing import (
    MOST_LETTERS,
    add_legend,
    draw_band,
    label_panels,
    line_look,
    panel_grid,
    shades,
    short,
    shown,
)
from harness.analysis.findings import Findings
from harness.analysis.response import Panel, Response, are_numbers, positions

MOST_BANDS = 3  # of a panel; more would cover each other


def response(found: Response) -> Figure | None:
    """A score over a factor: a line for each value of the hue, a panel for each of the facet.

    Over categories, points are not joined.
    """
    panels = [panel for panel in found.panels if panel.cells]
    if not panels:
        return None
    design = found.design
    alone = len(panels) == 1
    one_task = len({id(f) for panel in panels for f in panel.findings}) == 1
    figure, grid = panel_grid(len(panels), 3.0 if alone else 2.4, sharey=one_task)
    at = positions(design.values)
    joined: dict[str, Any] = {} if are_numbers(design.values) else {"linestyle": "none"}
    least = min(np.diff(sorted(at)), default=1.0)
    for axes, panel in zip(grid, panels, strict=True):
        _draw_margin(axes, panel)
        for number, line in enumerate(design.lines):
            points = [
                (x, c.mean)
                for x, value in zip(at, design.values, strict=True)
                if (c := panel.cells.get((line, value))) is not None
            ]
            # Lines stand beside each other, so that their intervals can be seen.
            shift = 0.09 * least * (number - (len(design.lines) - 1) / 2)
            shift = min(1.0, 4 / len(design.lines)) * shift
            means = np.array([[m.value, m.value - m.low, m.high - m.value] for _, m in points])
            if not points:
                continue
            axes.errorbar(
                [x + shift for x, _ in points],
                means[:, 0],
                yerr=np.nan_to_num(means[:, 1:]).T,
                capsize=2,
                elinewidth=1.1,
                markersize=4.5,
                **line_look(number) | joined,
            )
        ticks = [shown(value) for value in design.values]
        slanted = sum(map(len, ticks)) > MOST_LETTERS * (2 if alone else 1)
        how: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(at, ticks, fontsize=9, **(how if slanted else {}))
        axes.set_title(shown(panel.title), fontsize=10, loc="left")
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(FuncFormatter(short))
    label_panels(figure, grid, " + ".join(design.x), panels[0].findings[0].score)
    if len(design.lines) > 1:
        lines = [
            Line2D([], [], markersize=4.5, **line_look(n) | joined)
            for n in range(len(design.lines))
        ]
        add_legend(figure, lines, design.lines, " + ".join(design.hue))
    return figure


def by_factors(
    findings: Findings,
    design: Design,
    drawn: Mapping[str, Band],
    xlabel: str,
    ylabel: str,
    *,
    steps: bool = False,
) -> Figure:
    """A panel for each line of the design, in which colour is the place on its x axis."""
    panels: dict[str, list[tuple[str, Band]]] = {}
    for label, band in drawn.items():
        place = design.place(findings.result(label).setting)
        title = " · ".join(filter(None, (place.panel, place.line)))
        panels.setdefault(title, []).append((place.x, band))
    figure, grid = panel_grid(len(panels), 2.0, sharey=True)
    colours = dict(zip(design.values, shades(len(design.values)), strict=True))
    for axes, (title, bands) in zip(grid, panels.items(), strict=True):
        for value, band in bands:
            look = {"color": colours[value]}
            draw_band(axes, band, look, steps=steps, shade=len(bands) <= MOST_BANDS)
        axes.set_title(shown(title), fontsize=9, loc="left")
        axes.xaxis.set_major_formatter(FuncFormatter(short))
    label_panels(figure, grid, xlabel, ylabel)
    lines = [Line2D([], [], color=colour) for colour in colours.values()]
    add_legend(figure, lines, design.values, " + ".join(design.x))
    return figure


def _draw_margin(axes: Axes, panel: Panel) -> None:
    """The differences that count as none, if there is one baseline."""
    compared = [cell.comparison for cell in panel.cells.values() if cell.comparison is not None]
    baselines = {comparison.baseline for comparison in compared}
    if len(baselines) != 1 or len(panel.findings) != 1:
        return
    scores = panel.findings[0].result(baselines.pop()).scores
    middle, margin = float(np.mean(list(scores.values()))), compared[0].margin
    axes.axhline(middle, color="#999999", linewidth=0.8, linestyle="--", zorder=1)
    if math.isfinite(margin):
        axes.axhspan(middle - margin, middle + margin, color="#999999", alpha=0.15, linewidth=0)
