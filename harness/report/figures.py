"""The figures of a report, drawn without pyplot: nothing stays behind in matplotlib's state."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from harness.analysis.statistics import Band
from harness.metrics import PHASES
from harness.report.analysis import LATENCIES, POINTS, Findings, Result

WIDTH = 5.8  # inches: at a phone's width the letters are still of a size to read
DPI = 160
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
FILLS = dict(zip(DASHES, ("full", "left", "none", "top"), strict=True))
MOST_TOGETHER = 6  # settings in one panel; more get a panel each
MOST_LOOKS = 12  # colours with dashes; of more settings the others are grey
MOST_BANDS = 3  # of profiles, which leave no room between them for more
LONGEST_LABEL = 48
PHASE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#999999")
GREY: dict[str, Any] = {"color": "#999999", "alpha": 0.45, "linewidth": 0.7, "zorder": 1.9}
INKS = {"light": ("#1b1b1b", "#ffffff", "#d9d9d9"), "dark": ("#e8e8e8", "#16181c", "#3c4048")}


@dataclass
class Drawn:
    """One figure in all the forms that a report needs."""

    slug: str
    caption: str
    alt: str
    png: bytes
    svg: str
    svg_dark: str


Plot = Callable[[Findings], "Figure | None"]


def draw(plot: Plot, findings: Findings, *, slug: str, caption: str, alt: str) -> Drawn | None:
    """Draw a figure for a white page and for a dark one; None if it would show nothing."""
    with matplotlib.rc_context(_style()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # names may be in any script
        figure = plot(findings)
        if figure is None:
            return None
        FigureCanvasAgg(figure)
        # Where all has its place is found once: it takes as long as drawing.
        figure.set_layout_engine("constrained")
        figure.draw_without_rendering()
        figure.set_layout_engine(None)
        png, svg = _save(figure, "png"), _save(figure, "svg").decode()
    return Drawn(slug, caption, alt, png=png, svg=svg, svg_dark=_darkened(svg))


def _darkened(svg: str) -> str:
    """The same drawing for a dark page."""
    for light, dark in zip(INKS["light"], INKS["dark"], strict=True):
        svg = svg.replace(light, dark)
    return svg


def _save(figure: Figure, form: str) -> bytes:
    stream = io.BytesIO()
    undated = {"png": {"Software": None}, "svg": {"Date": None}}[form]
    figure.savefig(stream, format=form, dpi=DPI, metadata=undated)
    return stream.getvalue()


def _style() -> Any:
    ink, paper, line = INKS["light"]
    inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor")
    return {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), line),
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
        "text.parse_math": False,  # a name is no formula, whatever it holds
        "svg.hashsalt": "lockstep",  # the same numbers give the same file
    }


def shown(label: str) -> str:
    """A name as it may stand in a figure: printable, and cut in the middle if it is long."""
    label = "".join(c if c.isprintable() else "�" for c in label)
    if len(label) > LONGEST_LABEL:
        half = LONGEST_LABEL // 2
        label = f"{label[:half]}…{label[-half:]}"
    return label if not label.startswith("_") else f" {label}"  # matplotlib hides _names


def looks(findings: Findings) -> dict[str, dict[str, Any]]:
    """A colour and a dash for each setting: where two lines coincide, both can be seen."""
    chosen = told_apart(findings)
    return {result.label: {**GREY, "linestyle": "-"} for result in findings.results} | {
        label: {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": DASHES[place % len(DASHES)],
        }
        for place, label in enumerate(chosen)
    }


def told_apart(findings: Findings) -> list[str]:
    """The settings that have a look of their own: if not all, the baseline and the best."""

    def rank(result: Result) -> tuple[bool, float]:
        score = result.estimates["iqm"].value if result.estimates else -math.inf
        return result.label != findings.baseline, -score

    best = {result.label for result in sorted(findings.results, key=rank)[:MOST_LOOKS]}
    return [result.label for result in findings.results if result.label in best]


def _legend(
    figure: Figure, findings: Findings, results: Sequence[Result], *, markers: bool = False
) -> None:
    chosen, styles = told_apart(findings), looks(findings)
    lines, labels = [], []
    for label in [result.label for result in results if result.label in chosen]:
        look = styles[label]
        fill = FILLS[look["linestyle"]]
        marked = {"marker": "D", "fillstyle": fill, "linestyle": ""} if markers else {}
        lines.append(Line2D([], [], **{**look, **marked}))
        labels.append(shown(label))
    if others := len(results) - len(labels):
        marked = {"marker": "o", "linestyle": ""} if markers else {}
        lines.append(Line2D([], [], **{**GREY, **marked}))
        labels.append(f"{others} others")
    columns = 2 if max(map(len, labels)) <= 30 else 1
    figure.legend(lines, labels, loc="outside lower left", ncols=columns, fontsize=9)


def _height(panel: float, drawn: Sequence[Result]) -> float:
    """Of a panel with a legend below it, in inches."""
    return panel + 0.22 * min(len(drawn), MOST_LOOKS + 1)


# -- learning


def curves_by_frames(findings: Findings) -> Figure | None:
    """The course of learning over frames, which says what data were worth."""
    return _curves(findings, lambda result: result.by_frames, "frames")


def curves_by_seconds(findings: Findings) -> Figure | None:
    """The course of learning over seconds, which says what waiting cost."""
    return _curves(findings, lambda result: result.by_seconds, "seconds in the learner's loop")


def _curves(
    findings: Findings, take: Callable[[Result], Band | None], xlabel: str
) -> Figure | None:
    bands = {r.label: b for r in findings.results if (b := take(r)) is not None}
    drawn = [result for result in findings.results if result.label in bands]
    if not drawn:
        return None
    if len(drawn) > MOST_TOGETHER:
        return _curve_panels(findings, drawn, bands, xlabel)
    figure = Figure(figsize=(WIDTH, _height(3.4, drawn)))
    axes = figure.add_subplot()
    styles = looks(findings)
    for result in drawn:
        _draw_band(axes, bands[result.label], **styles[result.label])
    axes.set(xlabel=xlabel, ylabel=findings.curve)
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    _legend(figure, findings, drawn)
    return figure


def _curve_panels(
    findings: Findings, drawn: Sequence[Result], bands: dict[str, Band], xlabel: str
) -> Figure:
    """A panel for each setting, each with all of them in grey behind it."""
    columns = 2
    rows = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(WIDTH, 0.6 + 1.75 * rows))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    # Axes that matplotlib lets share their limits take time by the square of their number.
    xlim = _limits([band.grid[np.isfinite(band.value)] for band in bands.values()])
    ylim = _limits([y for band in bands.values() for y in (band.value, band.low, band.high)])
    for place, (axes, result) in enumerate(zip(panels, drawn, strict=False)):
        axes.set(xlim=xlim, ylim=ylim)
        _draw_others(axes, list(bands.values()))
        _draw_band(axes, bands[result.label], color=COLOURS[0], linestyle="-")
        axes.set_title(shown(result.label), fontsize=9, loc="left")
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        below = place + columns < len(drawn)
        axes.tick_params(labelbottom=not below, labelleft=place % columns == 0)
    for axes in panels[len(drawn) :]:
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
    """The curves; of many, which would cover each other, the area that they lie in."""
    if len(bands) <= MOST_LOOKS:
        for band in bands:
            axes.plot(band.grid, band.value, **GREY)
        return
    values = np.array([band.value for band in bands])
    low, high = np.fmin.reduce(values), np.fmax.reduce(values)
    axes.fill_between(bands[0].grid, low, high, color=GREY["color"], alpha=0.2, linewidth=0)


def _draw_band(axes: Axes, band: Band, *, color: str, linestyle: str) -> None:
    axes.plot(band.grid, band.value, color=color, linestyle=linestyle)
    if np.isfinite(band.low).any():
        axes.fill_between(band.grid, band.low, band.high, color=color, alpha=0.16, linewidth=0)


def _short(value: float, _: int) -> str:
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{sign}"
    return f"{value:g}"


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
    drawn = [result for result in findings.results if result.profile is not None]
    if not drawn:
        return None
    figure = Figure(figsize=(WIDTH, _height(3.2, drawn)))
    axes = figure.add_subplot()
    styles = looks(findings)
    for result in drawn:
        assert result.profile is not None
        found, look = result.profile, styles[result.label]
        axes.step(found.thresholds, found.share, where="post", **look)
        if len(drawn) <= MOST_BANDS and np.isfinite(found.low).any():
            axes.fill_between(
                found.thresholds,
                found.low,
                found.high,
                step="post",
                color=look["color"],
                alpha=0.10,
                linewidth=0,
            )
    axes.set(xlabel=f"{findings.score} above", ylabel="share of runs", ylim=(-0.02, 1.02))
    axes.ticklabel_format(axis="x", useOffset=False)
    low, high = axes.get_xlim()
    if (least := 0.04 * abs(low + high) / 2) > high - low:  # all runs score alike
        axes.set_xlim(low - least / 2, high + least / 2)
    _legend(figure, findings, drawn)
    return figure


# -- synchronisation


def latencies(findings: Findings) -> Figure | None:
    """How publish, acknowledge and apply times spread over the records."""
    drawn = [result for result in findings.results if result.latencies]
    if not drawn:
        return None
    names = [name for name in LATENCIES if any(name in r.latencies for r in drawn)]
    words = {"publish": "publish", "ack": "acknowledge", "apply": "apply"}
    figure = Figure(figsize=(WIDTH, _height(2.7, drawn)))
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    styles = looks(findings)
    for axes, name in zip(panels, names, strict=True):
        for result in drawn:
            if (found := result.latencies.get(name)) is not None:
                axes.step(found, np.linspace(0, 1, POINTS), **styles[result.label])
        axes.set(title=words[name], xlabel="ms")
        if all(r.latencies[name][0] > 0 for r in drawn if name in r.latencies):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(_short))
            axes.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("share of records")
    _legend(figure, findings, drawn)
    return figure


def lags(findings: Findings) -> Figure | None:
    """How the lag of consumed frames spreads over the records."""
    drawn = [result for result in findings.results if result.lags is not None]
    if not drawn:
        return None
    figure = Figure(figsize=(WIDTH, _height(2.8, drawn)))
    axes = figure.add_subplot()
    styles = looks(findings)
    for result in drawn:
        assert result.lags is not None
        ends = np.concatenate([[result.lags[0]], result.lags])
        shares = np.concatenate([[0], np.linspace(0, 1, POINTS)])
        axes.plot(ends, shares, **styles[result.label])
    axes.set(xlabel="mean lag of a record's frames (versions)", ylabel="share of records")
    axes.margins(x=0.03)
    _legend(figure, findings, drawn)
    return figure


def throughput(findings: Findings) -> Figure | None:
    """Frames a second against lag: a point for each run, a larger one for the medians."""
    drawn = [r for r in findings.results if len(_points(r))]
    if not drawn:
        return None
    figure = Figure(figsize=(WIDTH, _height(3.2, drawn)))
    axes = figure.add_subplot()
    styles = looks(findings)
    for result in drawn:
        points, look = _points(result), styles[result.label]
        style: dict[str, Any] = {"color": look["color"], "fillstyle": FILLS[look["linestyle"]]}
        axes.plot(*points.T, "o", alpha=0.5, markersize=5, **style)
        axes.plot(*np.median(points, axis=0), "D", markersize=9, **style)
    axes.set(xlabel="mean lag (versions)", ylabel="frames a second")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # its margin is of the data, without what is below
    axes.margins(x=0.05)
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    _legend(figure, findings, drawn, markers=True)
    return figure


def _points(result: Result) -> np.ndarray:
    runs = [run.summary for run in result.setting.done.values()]
    known = [s for s in runs if "policy/lag_mean" in s and "fps" in s]
    return np.array([[s["policy/lag_mean"], s["fps"]] for s in known])


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


def _rows(results: Sequence[Result]) -> tuple[Figure, Axes]:
    """A figure with a row for each setting, the first on top."""
    figure = Figure(figsize=(WIDTH, 1.3 + 0.42 * len(results)))
    axes = figure.add_subplot()
    axes.set_yticks(range(len(results)), [shown(result.label) for result in results], fontsize=9)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    return figure, axes
