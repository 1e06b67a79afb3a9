"""Figures of one run, drawn from its records at its end."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# figure: (what is drawn over frames, what its axis says)
FIGURES: dict[str, tuple[tuple[str, ...], str]] = {
    "return": (("episode/return", "eval/return"), "return"),
    "latency": (("sync/publish_ms", "sync/ack_ms", "sync/apply_ms"), "ms"),
    "lag": (("policy/lag_mean", "policy/lag_p95", "policy/lag_max"), "versions"),
    "lag_updates": (
        ("policy/lag_updates_mean", "policy/lag_updates_p95", "policy/lag_updates_max"),
        "updates",
    ),
    "ess": (("policy/ess",), "share of frames"),
}
POINTS = 2_000  # at most, of one line; a figure shows no more


def draw_run(metrics: Path) -> dict[str, bytes]:
    """PNG files by the figure's name; a figure of which there is no number is left out."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = {}
    for name, (drawn, unit) in FIGURES.items():
        lines = {metric: _line(records, metric) for metric in drawn}
        lines = {metric: line for metric, line in lines.items() if line[0]}
        if lines:
            found[name] = _png(lines, unit)
    return found


Line = tuple[list[float], list[float]]


def _line(records: Sequence[Mapping[str, Any]], metric: str) -> Line:
    """Frames and values of the records that have the metric."""
    points = [
        (float(record["step"]), float(record[metric]))
        for record in records
        if isinstance(record.get(metric), int | float) and math.isfinite(record[metric])
    ]
    points = points[:: 1 + len(points) // POINTS]
    return [x for x, _ in points], [y for _, y in points]


def _png(lines: Mapping[str, Line], unit: str) -> bytes:
    from matplotlib.figure import Figure

    figure: Figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for metric, (frames, values) in lines.items():
        axes.plot(frames, values, label=metric, marker="o" if len(frames) < 30 else None)
    axes.set(xlabel="frames", ylabel=unit)
    axes.legend(frameon=False)
    return to_bytes(figure, "png", dpi=120)


def to_bytes(figure: Figure, form: str, dpi: int) -> bytes:
    """The figure as a PNG or SVG file, the same to the byte for the same figure."""
    undated = {"png": {"Software": None}, "svg": {"Date": None}}[form]
    stream = io.BytesIO()
    figure.savefig(stream, format=form, dpi=dpi, metadata=undated)
    return stream.getvalue()
