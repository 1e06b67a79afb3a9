"""The figures of a report, drawn without pyplot so that matplotlib keeps no state of them."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from harness.analysis.blocks import Picture
from harness.analysis.curves import Band
from harness.analysis.findings import HEALTH, LAGS, LATENCIES, POINTS, Findings, Result
from harness.analysis.progress import show_progress
from harness.logging.figures import to_bytes
from harness.metrics import PHASES
from harness.staleness import BUCKETS

WIDTH = 5.8  # inches: letters stay readable at a phone's width
DPI = 160
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
FILLS = dict(zip(DASHES, ("full", "left", "none", "top"), strict=True))
MOST_TOGETHER = 6  # settings in one panel; more get a panel each
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

Plot = Callable[[Findings], Figure | None]


def draw(plot: Plot, findings: Findings, slug: str, caption: str) -> Picture | None:
    """Draw a figure for a white page and for a dark one; None if it would show nothing."""
    show_progress(f"drawing {slug} of {findings.task.name}")
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # names may be in any script
        figure = plot(findings)
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
    labels = ", ".join(result.label for result in findings.results)
    return Picture(slug, caption, f"{caption} ({labels})", png, svg, dark)


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
    if len(drawn) > MOST_TOGETHER:
        return _curve_panels(findings, {r.label: r.curves[axis] for r in drawn}, xlabel)
    figure = _figure(findings, drawn, 3.4)
    axes = figure.add_subplot()
    styles = looks(findings)
    for result in drawn:
        _draw_band(axes, result.curves[axis], styles[result.label])
    axes.set(xlabel=xlabel, ylabel=findings.curve)
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    return figure


def _curve_panels(findings: Findings, bands: dict[str, Band], xlabel: str) -> Figure:
    """A panel for each setting, each with all of them in grey behind it."""
    columns = 2
    rows = math.ceil(len(bands) / columns)
    height = 1.6 + 0.15 * _num_lines(bands)
    figure = Figure(figsize=(WIDTH, 0.6 + height * rows))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    # Limits are set by hand: shared axes take time by the square of their number.
    xlim = _limits([band.grid[np.isfinite(band.value)] for band in bands.values()])
    ylim = _limits([y for band in bands.values() for y in (band.value, band.low, band.high)])
    for place, (axes, (label, band)) in enumerate(zip(panels, bands.items(), strict=False)):
        axes.set(xlim=xlim, ylim=ylim)
        _draw_others(axes, list(bands.values()))
        _draw_band(axes, band, {"color": COLOURS[0], "linestyle": "-"})
        axes.set_title(shown(label), fontsize=9, loc="left")
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        below = place + columns < len(bands)
        axes.tick_params(labelbottom=not below, labelleft=place % columns == 0)
    for axes in panels[len(bands) :]:
        axes.set_axis_off()
    figure.supxlabel(xlabel, fontsize=10)
    figure.supylabel(findings.curve, fontsize=10)
    return figure


def _limits(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """From the least to the greatest, with matplotlib's margins."""
    found = np.concatenate(values)
    found = found[np.isfinite(found)]
    low, high = (found.min(), found.max()) if len(found) else (0.0, 1.0)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return low - room, high + room


def _draw_others(axes: Axes, bands: Sequence[Band]) -> None:
    """The curves in grey; of many, the area that they lie in."""
    if len(bands) <= MOST_LOOKS:
        for band in bands:
            axes.plot(band.grid, band.value, **GREY)
        return
    values = np.array([band.value for band in bands])
    low, high = np.fmin.reduce(values), np.fmax.reduce(values)
    axes.fill_between(bands[0].grid, low, high, color=GREY["color"], alpha=0.2, linewidth=0)


# -- scores


def scores(findings: Findings) -> Figure | None:
    """Every seed's score, with the IQM and its interval."""
    drawn = [result for result in findings.results if result.scores]
    if not drawn:
        return None
    figure, axes = _rows(drawn)
    styles = looks(findings)
    for place, result in enumerate(drawn):
        colour = styles[result.label]["color"]
        values = list(result.scores.values())
        axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.45, markersize=5)
        found = result.estimates["iqm"]
        if found.has_interval:
            axes.plot([found.low, found.high], [place + 0.25] * 2, color=colour, linewidth=2.5)
        axes.plot([found.value], [place + 0.25], "D", color=colour, markersize=6)
    if findings.target is not None:
        axes.axvline(findings.target, color="#999999", linestyle="--", linewidth=1)
    axes.set(xlabel=findings.score)
    return figure


def profiles(findings: Findings) -> Figure | None:
    """The share of runs above each score."""
    drawn = {r.label: r.profile for r in findings.results if r.profile is not None}
    if not drawn:
        return None
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
    figure, axes = _rows(drawn)
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
    """A colour and a dash for each setting: where two lines coincide, both can be seen."""
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
    styles = looks(findings)
    lines, labels = [], []
    for label in [r.label for r in drawn if styles[r.label] is not GREY]:
        look = styles[label]
        marker = {"marker": "D", "fillstyle": FILLS[look["linestyle"]], "linestyle": ""}
        lines.append(Line2D([], [], **(look | (marker if markers else {}))))
        labels.append(shown(label))
    if others := len(drawn) - len(labels):
        marker = {"marker": "o", "linestyle": ""}
        lines.append(Line2D([], [], **(GREY | (marker if markers else {}))))
        labels.append(f"{others} others")
    columns = 2 if max(map(len, labels)) <= 30 else 1
    num_lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(WIDTH, height + 0.22 * num_lines))
    figure.legend(lines, labels, loc="outside lower left", ncols=columns, fontsize=9)
    return figure


def _rows(results: Sequence[Result]) -> tuple[Figure, Axes]:
    """A figure with a row for each setting, the first on top."""
    height = 0.27 + 0.15 * _num_lines(result.label for result in results)
    figure = Figure(figsize=(WIDTH, 1.3 + height * len(results)))
    axes = figure.add_subplot()
    axes.set_yticks(range(len(results)), [shown(result.label) for result in results], fontsize=9)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    return figure, axes


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
