"""The figures of a report, drawn without pyplot so that matplotlib keeps no state of them."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from harness.analysis.blocks import Picture
from harness.analysis.curves import Band
from harness.analysis.design import Design
from harness.analysis.findings import HEALTH, LAGS, LATENCIES, POINTS, Findings, Result
from harness.analysis.progress import show_progress
from harness.analysis.response import Panel, Response, positions
from harness.analysis.statistics import student
from harness.logging.figures import to_bytes
from harness.metrics import PHASES
from harness.staleness import BUCKETS

WIDTH = 5.8  # inches: letters stay readable at a phone's width
DPI = 160
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
PLASMA = matplotlib.colormaps["plasma"]
FILLS = dict(zip(DASHES, ("full", "left", "none", "top"), strict=True))
MOST_LOOKS = 12  # colours with dashes; of more settings the others are grey
MOST_BANDS = 3  # of profiles; more would cover each other
LONGEST_LABEL = 48  # characters of a line
MOST_LINES = 5  # of a name
PHASE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#999999")
GREY: dict[str, Any] = {"color": "#999999", "alpha": 0.45, "linewidth": 0.7, "linestyle": "-"} | {
    "zorder": 1.9  # behind the settings that have colours
}
INKS = {"light": ("#1b1b1b", "#ffffff", "#d9d9d9"), "dark": ("#e8e8e8", "#16181c", "#3c4048")}
INK, PAPER, LINE = INKS["light"]
INKED = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor")
STYLE: Any = {
    **dict.fromkeys(INKED, INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), LINE),
    "figure.dpi": DPI,
    "font.size": 10.5,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "text.parse_math": False,  # names are not formulas
    "svg.hashsalt": "lockstep",  # the same numbers give the same file
}


def draw(
    plot: Callable[[Any], Figure | None], shown_of: Any, slug: str, caption: str
) -> Picture | None:
    """Draw a figure for a white page and for a dark one; None if it would show nothing."""
    show_progress(f"drawing {slug}")
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # names may be in any script
        figure = plot(shown_of)
        if figure is None:
            return None
        FigureCanvasAgg(figure)
        # The layout, which takes as long as drawing, is computed once for both forms.
        figure.set_layout_engine("constrained")
        figure.draw_without_rendering()
        figure.set_layout_engine(None)
        png, svg = to_bytes(figure, "png", DPI), to_bytes(figure, "svg", DPI).decode()
    dark = svg
    for light_ink, dark_ink in zip(INKS["light"], INKS["dark"], strict=True):
        dark = dark.replace(light_ink, dark_ink)
    told = ", ".join(result.label for result in getattr(shown_of, "results", ()))
    return Picture(slug, caption, f"{caption} ({told})" if told else caption, png, svg, dark)


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
        return _by_factors(findings, findings.design, bands, xlabel, findings.curve)
    figure = _figure(findings, drawn, 3.4)
    axes = figure.add_subplot()
    styles = looks(findings)
    for result in drawn:
        _draw_band(axes, result.curves[axis], styles[result.label])
    axes.set(xlabel=xlabel, ylabel=findings.curve)
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    return figure


def _by_factors(
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
            _draw_band(axes, band, look, steps=steps, shade=len(bands) <= MOST_BANDS)
        axes.set_title(shown(title), fontsize=9, loc="left")
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
    label_panels(figure, grid, xlabel, ylabel)
    lines = [Line2D([], [], color=colour) for colour in colours.values()]
    add_legend(figure, lines, design.values, " + ".join(design.x))
    return figure


def shades(number: int) -> list[str]:
    """Colours of ordered values, which show on a white page and on a dark one."""
    return [to_hex(PLASMA(share)) for share in np.linspace(0.15, 0.85, number)]


def panel_grid(number: int, height: float, *, sharey: bool) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, in two columns if there are several."""
    columns = min(number, 2)
    rows = math.ceil(number / columns)
    figure = Figure(figsize=(WIDTH, 0.9 + height * rows))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharey, sharey=sharey)
    panels = list(grid.flat)
    for axes in panels[number:]:
        axes.remove()
    if number % columns:  # the last of the right column has its ticks hidden otherwise
        panels[number - columns].tick_params(labelbottom=True)
    return figure, panels[:number]


def label_panels(figure: Figure, grid: Sequence[Axes], xlabel: str, ylabel: str) -> None:
    """The names of the axes: of x below each column, of y once."""
    for axes in grid[-2:]:
        axes.set_xlabel(xlabel)
    figure.supylabel(ylabel, fontsize=10.5)


def add_legend(figure: Figure, lines: Sequence[Line2D], labels: Sequence[str], title: str) -> None:
    """A legend below the panels, for which the figure grows."""
    names = [shown(label) for label in labels]
    columns = max(1, min(len(names), 84 // (7 + max(map(len, names)))))
    rows = math.ceil(len(names) / columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.22 * (rows + bool(title)))
    figure.legend(
        lines, names, loc="outside lower center", ncols=columns, fontsize=9, title=title or None
    )


def response(found: Response) -> Figure | None:
    """A score over a factor: a line for each value of the hue, a panel for each of the facet."""
    panels = [panel for panel in found.panels if panel.cells]
    if not panels:
        return None
    design = found.design
    alone = len(panels) == 1
    one_task = len({id(f) for panel in panels for f in panel.findings}) == 1
    figure, grid = panel_grid(len(panels), 3.0 if alone else 2.4, sharey=one_task)
    at = positions(design.values)
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
                **line_look(number),
            )
        axes.set_xticks(at, [shown(value) for value in design.values], fontsize=9)
        axes.set_title(shown(panel.title), fontsize=10, loc="left")
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
    label_panels(figure, grid, " + ".join(design.x), panels[0].findings[0].score)
    if len(design.lines) > 1:
        lines = [Line2D([], [], markersize=4.5, **line_look(n)) for n in range(len(design.lines))]
        add_legend(figure, lines, design.lines, " + ".join(design.hue))
    return figure


def line_look(number: int) -> dict[str, Any]:
    """Colour, marker and dash of a line of a design."""
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    place = number % len(COLOURS)
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": dash}


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


# -- scores


def scores(found: Sequence[Findings]) -> Figure | None:
    """Every seed's score, with the mean and its interval; tasks below each other."""
    tasks = [(f, drawn) for f in found if (drawn := [r for r in f.results if r.scores])]
    if not tasks:
        return None
    figure, panels = _rows([drawn for _, drawn in tasks])
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
        return _by_factors(findings, findings.design, drawn, above, share, steps=True)
    figure = _figure(findings, [r for r in findings.results if r.label in drawn], 3.2)
    axes = figure.add_subplot()
    styles = looks(findings)
    for label, profile in drawn.items():
        _draw_band(axes, profile, styles[label], steps=True, shade=len(drawn) <= MOST_BANDS)
    axes.set(xlabel=f"{findings.score} above", ylabel="share of runs", ylim=(-0.02, 1.02))
    axes.ticklabel_format(axis="x", useOffset=False)
    low, high = axes.get_xlim()
    if (least := 0.04 * abs(low + high) / 2) > high - low:  # all runs score alike
        axes.set_xlim(low - least / 2, high + least / 2)
    return figure


# -- synchronisation and time


def latencies(findings: Findings) -> Figure | None:
    """How publish, acknowledge and apply times spread over the records."""
    return _distributions(findings, LATENCIES, "ms", log=True)


def lags(findings: Findings) -> Figure | None:
    """How the lag of consumed frames spreads over the records."""
    return _distributions(findings, {LAGS[0]: ""}, "mean lag of a record's frames (versions)")


def health(findings: Findings) -> Figure | None:
    """What lag does to importance weights: effective sample size and divergence by bucket."""
    found = {result.label: result.health() for result in findings.results}
    drawn = [result for result in findings.results if found[result.label]]
    if not drawn:
        return None
    figure = _figure(findings, drawn, 2.8)
    styles, places = looks(findings), list(BUCKETS)
    for axes, name in zip(figure.subplots(1, 2), ("policy/ess", "policy/kl"), strict=True):
        column = list(HEALTH).index(name)
        for result in drawn:
            buckets = found[result.label]
            x = [places.index(bucket) for bucket in buckets]
            y = [values[column] for values in buckets.values()]
            axes.plot(x, y, marker="o", markersize=4, **styles[result.label])
        axes.set_xticks(range(len(places)), list(BUCKETS.values()), fontsize=8)
        axes.set(title=HEALTH[name], xlabel="lag (updates)", xlim=(-0.5, len(places) - 0.5))
    return figure


def _distributions(
    findings: Findings, titles: dict[str, str], xlabel: str, *, log: bool = False
) -> Figure | None:
    """A panel for each metric: the share of records below each value."""
    names = [n for n in titles if any(n in r.distributions for r in findings.results)]
    drawn = [r for r in findings.results if any(name in r.distributions for name in names)]
    if not drawn:
        return None
    figure = _figure(findings, drawn, 2.8)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    styles = looks(findings)
    for axes, name in zip(panels, names, strict=True):
        found = {r.label: r.distributions[name] for r in drawn if name in r.distributions}
        for label, values in found.items():
            axes.plot([values[0], *values], [0, *np.linspace(0, 1, POINTS)], **styles[label])
        axes.set(title=titles[name], xlabel=xlabel)
        axes.margins(x=0.03)
        if log and all(values[0] > 0 for values in found.values()):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(_short))
            axes.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("share of records")
    return figure


def throughput(findings: Findings) -> Figure | None:
    """Frames a second against lag: a point for each run, a larger one for the medians."""
    drawn = [result for result in findings.results if len(_points(result))]
    if not drawn:
        return None
    figure = _figure(findings, drawn, 3.2, markers=True)
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
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    return figure


def _points(result: Result) -> np.ndarray:
    known = [r.summary for r in result.runs if {"policy/lag_mean", "fps"} <= r.summary.keys()]
    return np.array([[summary["policy/lag_mean"], summary["fps"]] for summary in known])


def times(findings: Findings) -> Figure | None:
    """Where the learner's time went."""
    drawn = [r for r in findings.results if math.isfinite(r.seconds_per_1000_frames("other"))]
    if not drawn:
        return None
    figure, (axes,) = _rows([drawn])
    before = np.zeros(len(drawn))
    for phase, colour in zip((*PHASES, "other"), PHASE_COLOURS, strict=True):
        spent = np.array([result.seconds_per_1000_frames(phase) for result in drawn])
        axes.barh(range(len(drawn)), spent, left=before, color=colour, height=0.62, label=phase)
        before += spent
    axes.set(xlabel="seconds for 1000 frames")
    figure.legend(loc="outside upper left", ncols=5, fontsize=9)
    return figure


# -- what the figures share


def shown(label: str) -> str:
    """A name as a figure shows it: printable, on a few lines of bounded length."""
    printable = "".join(c if c.isprintable() else "�" for c in label)
    words = _cut(printable, MOST_LINES * LONGEST_LABEL).split(" ")
    text = textwrap.fill(
        " ".join(_cut(word, LONGEST_LABEL) for word in words),
        width=LONGEST_LABEL + 1,
        break_on_hyphens=False,
    )
    return text if not text.startswith("_") else f" {text}"  # matplotlib hides _names


def _cut(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def _num_lines(labels: Iterable[str]) -> int:
    """Of the longest of the names."""
    return max(shown(label).count("\n") + 1 for label in labels)


def looks(findings: Findings) -> dict[str, dict[str, Any]]:
    """A colour and a dash for each setting: where two lines coincide, both can be seen.

    With a design, colour is the line and its strength the place on the x axis.
    """
    if (design := findings.design) is not None:
        strengths = np.linspace(0.3, 1.0, len(design.values))
        return {
            result.label: {key: line_look(number)[key] for key in ("color", "linestyle")}
            | {"alpha": float(strengths[design.values.index(place.x)])}
            for result in findings.results
            for place in [design.place(result.setting)]
            for number in [design.lines.index(place.line)]
        }
    found = {result.label: GREY for result in findings.results}
    for place, label in enumerate(_told_apart(findings)):
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        found[label] = {"color": colour, "linestyle": dash}
    return found


def _told_apart(findings: Findings) -> list[str]:
    """The settings with a look of their own: if not all, the baseline and the best."""

    def rank(result: Result) -> tuple[bool, float]:
        score = result.estimates["iqm"].value if result.estimates else -math.inf
        return result.label != findings.baseline, -score

    best = {result.label for result in sorted(findings.results, key=rank)[:MOST_LOOKS]}
    return [result.label for result in findings.results if result.label in best]


def _figure(
    findings: Findings, drawn: Sequence[Result], height: float, *, markers: bool = False
) -> Figure:
    """A figure with a legend below its panel, which is so many inches high."""
    looked = _legend_of_design(findings.design) if findings.design else _legend(findings, drawn)
    labels = [label for label, _ in looked]
    lines = []
    for _, look in looked:
        marker = {"marker": "D", "fillstyle": FILLS[look["linestyle"]], "linestyle": ""}
        lines.append(Line2D([], [], **(look | (marker if markers else {}))))
    columns = 2 if max(map(len, labels)) <= 30 else 1
    num_lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(WIDTH, height + 0.22 * num_lines))
    figure.legend(lines, labels, loc="outside lower left", ncols=columns, fontsize=9)
    return figure


def _legend(findings: Findings, drawn: Sequence[Result]) -> list[tuple[str, dict[str, Any]]]:
    """Each setting that has a look of its own, and how many others there are."""
    styles = looks(findings)
    own = [(shown(r.label), look) for r in drawn if (look := styles[r.label]) is not GREY]
    others = len(drawn) - len(own)
    return own + [(f"{others} others", GREY)] * bool(others)


def _legend_of_design(design: Design) -> list[tuple[str, dict[str, Any]]]:
    """The colours of the lines, then how strong the values of x are."""
    strengths = np.linspace(0.3, 1.0, len(design.values))
    colours = [
        (shown(line) or "all", {key: line_look(number)[key] for key in ("color", "linestyle")})
        for number, line in enumerate(design.lines)
    ]
    return colours + [
        (
            shown(f"{' + '.join(design.x)}={value}"),
            {"color": "#777777", "alpha": float(strength), "linestyle": "-"},
        )
        for value, strength in zip(design.values, strengths, strict=True)
    ]


def _rows(groups: Sequence[Sequence[Result]]) -> tuple[Figure, list[Axes]]:
    """A figure with a row for each setting, the first on top; a panel for each group of them."""
    heights = [
        len(group) * (0.27 + 0.15 * _num_lines(result.label for result in group))
        for group in groups
    ]
    figure = Figure(figsize=(WIDTH, 0.7 + 0.6 * len(groups) + sum(heights)))
    panels = list(figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0])
    for axes, group in zip(panels, groups, strict=True):
        axes.set_yticks(range(len(group)), [shown(r.label) for r in group], fontsize=9)
        axes.set_ylim(len(group) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
    return figure, panels


def _draw_band(
    axes: Axes, band: Band, look: dict[str, Any], *, steps: bool = False, shade: bool = True
) -> None:
    """A curve and the area of its interval."""
    drawstyle: Any = "steps-post" if steps else "default"
    axes.plot(band.grid, band.value, drawstyle=drawstyle, **look)
    if shade and np.isfinite(band.low).any():
        style: dict[str, Any] = {"color": look["color"], "alpha": 0.16, "linewidth": 0}
        if steps:
            style |= {"step": "post", "alpha": 0.10}
        axes.fill_between(band.grid, band.low, band.high, **style)


def _short(value: float, _: int) -> str:
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{sign}"
    return f"{value:g}"
