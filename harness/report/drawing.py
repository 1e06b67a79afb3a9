"""What the figures of a report share; they are drawn without pyplot, which would keep state."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.design import Design
from harness.report.pages import Picture
from harness.report.scores import Report, Score
from harness.report.text import printable, show_progress

WIDTHS = {"wide": 9.0, "narrow": 4.0}  # inches: of the page's column, and of a phone
DPI = 160
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
PLASMA = matplotlib.colormaps["plasma"]
FILLS = dict(zip(DASHES, ("full", "left", "none", "top"), strict=True))
MOST_LOOKS = 12  # colours with dashes; of more settings the others are grey
LONGEST_LABEL = 48  # characters of a line
MOST_LINES = 5  # of a name
MOST_LETTERS = 24  # below a panel that stands beside another
GREY: dict[str, Any] = {
    "color": "#999999",
    "alpha": 0.45,
    "linewidth": 0.7,
    "linestyle": "-",
    "zorder": 1.9,  # behind the settings that have colours
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
    plot: Callable[[], Figure | None], slug: str, caption: str, names: Sequence[str] = ()
) -> Picture | None:
    """Draw a figure for a white page and for a dark one; None if it would show nothing.

    names: of the settings in it, for those who cannot see it.
    """
    show_progress(f"drawing {slug}")
    forms: dict[str, str] = {}
    png = b""
    for name, width in WIDTHS.items():
        style = STYLE | {"figure.figsize": (width, width)}
        with matplotlib.rc_context(style), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # names may be in any script
            figure = plot()
            if figure is None:
                return None
            FigureCanvasAgg(figure)
            # The layout, which takes as long as drawing, is computed once for both forms.
            figure.set_layout_engine("constrained")
            figure.draw_without_rendering()
            figure.set_layout_engine(None)
            png = png or to_bytes(figure, "png")
            forms[name] = to_bytes(figure, "svg").decode()
    alt = f"{caption} ({', '.join(names)})" if names else caption
    wide, narrow = forms["wide"], forms["narrow"]
    return Picture(slug, caption, alt, png, wide, dark(wide), narrow, dark(narrow))


def dark(svg: str) -> str:
    """The same drawing for a dark page."""
    for light_ink, dark_ink in zip(INKS["light"], INKS["dark"], strict=True):
        svg = svg.replace(light_ink, dark_ink)
    return svg


def is_narrow() -> bool:
    """Whether the figure that is being drawn is for a phone."""
    return width() <= WIDTHS["narrow"]


def width() -> float:
    """Of the figure that is being drawn, in inches."""
    return float(matplotlib.rcParams["figure.figsize"][0])


def to_bytes(figure: Figure, form: str) -> bytes:
    """The figure as a PNG or SVG file, the same to the byte for the same figure."""
    undated = {"png": {"Software": None}, "svg": {"Date": None}}[form]
    stream = io.BytesIO()
    figure.savefig(stream, format=form, dpi=DPI, metadata=undated)
    return stream.getvalue()


def shown(label: str) -> str:
    """A name as a figure shows it: printable, on a few lines of bounded length."""
    longest = LONGEST_LABEL // 2 if is_narrow() else LONGEST_LABEL
    words = _cut(printable(label), MOST_LINES * longest).split(" ")
    text = textwrap.fill(
        " ".join(_cut(word, longest) for word in words),
        width=longest + 1,
        break_on_hyphens=False,
    )
    return text if not text.startswith("_") else f" {text}"  # matplotlib hides _names


def _cut(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def num_lines(labels: Iterable[str]) -> int:
    """Of the longest of the names."""
    return max(shown(label).count("\n") + 1 for label in labels)


def looks(report: Report, score: Score) -> dict[str, dict[str, Any]]:
    """A colour and a dash for each setting: where two lines coincide, both can be seen.

    With a design, colour is the line and its strength the place on the x axis.
    """
    if report.design is not None:
        places = report.design.places.loc[score.task]
        return {place.Index: _look_in(report.design, place) for place in places.itertuples()}
    every = dict.fromkeys(score.scores.index, GREY)
    for place, label in enumerate(_told_apart(score)):
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        every[label] = {"color": colour, "linestyle": dash}
    return every


def _look_in(design: Design, place: Any) -> dict[str, Any]:
    look = line_look(design.lines.index(place.line))
    strength = strengths(design)[design.values.index(place.x)]
    return {"color": look["color"], "linestyle": look["linestyle"], "alpha": strength}


def strengths(design: Design) -> list[float]:
    """How strong the colour of each value of x is."""
    return [float(strength) for strength in np.linspace(0.3, 1.0, len(design.values))]


def _told_apart(score: Score) -> list[str]:
    """The settings with a look of their own: if not all, the baseline and the best."""

    def rank(label: str) -> tuple[bool, float]:
        estimate = score.estimates.get((label, "iqm"))
        return label != score.baseline, math.inf if estimate is None else -estimate.value

    best = set(sorted(score.scores.index, key=rank)[:MOST_LOOKS])
    return [label for label in score.scores.index if label in best]


def line_look(number: int) -> dict[str, Any]:
    """Colour, marker and dash of a line of a design."""
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    place = number % len(COLOURS)
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": dash}


def shades(number: int) -> list[str]:
    """Colours of ordered values, which show on a white page and on a dark one."""
    return [to_hex(PLASMA(share)) for share in np.linspace(0.15, 0.85, number)]


Key = list[tuple[str, dict[str, Any]]]  # the names of a legend, each with its look


def legend_of(report: Report, score: Score, drawn: Sequence[str]) -> Key:
    """The names of the settings, or of the lines and of the values of x, with their looks.

    Settings without a look of their own are counted.
    """
    if report.design is not None:
        return _legend_of_design(report.design)
    styles = looks(report, score)
    key = [(label, styles[label]) for label in drawn if styles[label] is not GREY]
    others = len(drawn) - len(key)
    return [*key, (f"{others} others", GREY)] if others else key


def _legend_of_design(design: Design) -> Key:
    """The colours of the lines, then how strong the values of x are."""
    colours = [
        (line or "all", {key: line_look(number)[key] for key in ("color", "linestyle")})
        for number, line in enumerate(design.lines)
    ]
    return colours + [
        (
            f"{' + '.join(design.x)}={value}",
            {"color": "#777777", "alpha": strength, "linestyle": "-"},
        )
        for value, strength in zip(design.values, strengths(design), strict=True)
    ]


def in_rows(groups: Sequence[Sequence[str]]) -> tuple[Figure, list[Axes]]:
    """A figure with a row for each setting, the first on top; a panel for each group of them."""
    heights = [len(group) * (0.27 + 0.15 * num_lines(group)) for group in groups]
    figure = Figure(figsize=(width(), 0.7 + 0.6 * len(groups) + sum(heights)))
    panels = list(figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0])
    for axes, group in zip(panels, groups, strict=True):
        axes.set_yticks(range(len(group)), [shown(label) for label in group], fontsize=9)
        axes.set_ylim(len(group) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
    return figure, panels


def panels(
    titles: Sequence[str],
    height: float,
    xlabel: str,
    ylabel: str,
    key: Key,
    *,
    key_title: str = "",
    share: bool = True,
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, in two columns if it is wide enough, and a legend.

    The legend is in the panel that is to spare, or below all, for which the figure grows.
    height: of a panel, in inches. share: whether the panels have the same axes.
    """
    num_columns = 1 if is_narrow() else min(len(titles), 2)
    num_rows = math.ceil(len(titles) / num_columns)
    figure = Figure(figsize=(width(), 0.9 + height * num_rows))
    grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=share, sharey=share)
    axes, spare = list(grid.flat)[: len(titles)], list(grid.flat)[len(titles) :]
    for one, title in zip(axes, titles, strict=True):
        one.set_title(shown(title), fontsize=9.5, loc="left")
    for one in spare:
        one.set_axis_off()
        axes[-2].tick_params(labelbottom=True)  # the last of its column has its ticks hidden
    if len(titles) > 1 and len(xlabel) > MOST_LETTERS:
        xlabel = xlabel.replace(" + ", " +\n")
    for one in axes[-num_columns:]:
        one.set_xlabel(xlabel)
    if len(titles) == 1:
        axes[0].set_ylabel(ylabel)
    else:
        figure.supylabel(ylabel, fontsize=10.5)
    lines, names = [Line2D([], [], **look) for _, look in key], [shown(name) for name, _ in key]
    style: dict[str, Any] = {"fontsize": 9, "title": key_title or None, "alignment": "left"}
    if spare and key:
        spare[0].legend(lines, names, loc="center", **style)
    elif key:
        longest = max(len(line) for name in names for line in name.splitlines())
        num_columns = max(1, min(len(names), int(13 * width()) // (7 + longest)))
        heights = math.ceil(len(names) / num_columns) * num_lines(names) + bool(key_title)
        figure.set_size_inches(width(), figure.get_figheight() + 0.22 * heights)
        figure.legend(lines, names, loc="outside lower left", ncols=num_columns, **style)
    return figure, axes


def draw_band(axes: Axes, band: pd.DataFrame, look: dict[str, Any], *, shade: bool = True) -> None:
    """A curve and the area of its interval."""
    axes.plot(band["x"], band["value"], **look)
    if shade and band["low"].notna().any():
        style: dict[str, Any] = {"color": look["color"], "alpha": 0.16, "linewidth": 0}
        axes.fill_between(band["x"], band["low"], band["high"], **style)


def short(value: float, _: int) -> str:
    """A tick's label: 20000 as 20k."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{sign}"
    return f"{value:g}"
