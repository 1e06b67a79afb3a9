"""A picture of a run's timeline: `python -m harness.logging.timeline <run dir>` writes an SVG file.

It shows a part of the trace that `logger=trace` wrote: a lane for the learner, and for each worker
one with its batches and the versions that it applied. A line leads from each publish to every
worker that applied its version.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.files import one_line, write_atomic
from harness.logging.figures import to_bytes
from harness.logging.trace import APPLIED, LEARNER, WORK, read_trace

COLOURS = {
    "collect": "#d9d9d9",
    "update": "#0072b2",
    "publish": "#d55e00",
    "log": "#b8860b",
    "evaluate": "#cc79a7",
    "checkpoint": "#56b4e9",
    "batch": "#009e73",
    "apply": "#d55e00",
}
LABELS = {
    "collect": "collect: waits for a batch",
    "publish": "publish; applied by a worker",
    "batch": "a worker's batch",
}
SHARE = 0.05  # of the run that is shown, if no length is named
MOST_SPANS = 20_000
STYLE: Any = {"svg.hashsalt": "lockstep", "svg.fonttype": "none", "font.size": 9}


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m harness.logging.timeline", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run's directory, with a trace.json")
    parser.add_argument("--out", type=Path, help="the .svg to write; <run dir>/timeline.svg")
    parser.add_argument("--start", type=float, metavar="S", help="first second shown; half-way")
    parser.add_argument("--seconds", type=float, metavar="S", help="how long; 5 %% of the run")
    options = parser.parse_args(arguments)
    out = options.out or options.run_dir / "timeline.svg"
    try:
        events = read_trace(options.run_dir / "trace.json")
        write_atomic(out, picture(events, options.start, options.seconds))
    except (ValueError, OSError, LookupError, TypeError) as error:
        print(f"timeline: {one_line(error)}", file=sys.stderr)
        return 2
    print(out)
    return 0


def picture(
    events: list[dict[str, Any]], start: float | None = None, seconds: float | None = None
) -> str:
    """The spans of a trace between two times, as the text of an SVG file."""
    spans = [event for event in events if event["ph"] == "X"]
    if not spans:
        raise ValueError("the trace has no events that last: a replayed schedule has none, either")
    end = max(_begin(span) + _length(span) for span in spans)
    start = end / 2 if start is None else start
    seconds = SHARE * end if seconds is None else seconds
    shown = [s for s in spans if _begin(s) < start + seconds and _begin(s) + _length(s) > start]
    if not 0 < len(shown) <= MOST_SPANS:
        raise ValueError(
            f"{len(shown)} events from {start:g} to {start + seconds:g} s of {end:g} s: "
            f"choose --start and --seconds so that there are 1 to {MOST_SPANS}"
        )
    names = _lane_names(events)
    lanes = sorted({span["pid"] for span in shown} | {LEARNER})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 1.2 + 0.55 * len(lanes)), layout="constrained")
        axes = figure.subplots()
        for lane, pid in enumerate(lanes):
            _draw_lane(axes, lane, [span for span in shown if span["pid"] == pid])
        _draw_versions(axes, events, lanes, start, start + seconds)
        axes.set_xlim(start, start + seconds)
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_yticks(range(len(lanes)), [names.get(pid, str(pid)) for pid in lanes])
        axes.set_xlabel("seconds since the start of the run")
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        found = {span["name"] for span in shown}
        used = [name for name in COLOURS if name in found and name != "apply"]
        patches = [Patch(color=COLOURS[name], label=LABELS.get(name, name)) for name in used]
        figure.legend(handles=patches, loc="outside upper center", ncols=5, frameon=False)
        return to_bytes(figure, "svg", dpi=100).decode()


def _draw_lane(axes: Axes, lane: int, spans: list[dict[str, Any]]) -> None:
    for name in {span["name"] for span in spans}:
        chosen = [span for span in spans if span["name"] == name]
        above = chosen[0]["tid"] == APPLIED
        where = (lane - 0.38, 0.14) if above else (lane - 0.2, 0.45)
        axes.broken_barh(
            [(_begin(span), _length(span)) for span in chosen],
            where,
            facecolor=COLOURS.get(name, "#777777"),
            edgecolor="white" if chosen[0]["tid"] == WORK else COLOURS.get(name, "#777777"),
            linewidth=0.5,
        )


def _draw_versions(
    axes: Axes, events: list[dict[str, Any]], lanes: list[int], start: float, end: float
) -> None:
    """A line from each publish to each worker that applied its version."""
    published = {event["id"]: _begin(event) for event in events if event["ph"] == "s"}
    for event in events:
        if event["ph"] != "f" or event["pid"] not in lanes or event["id"] not in published:
            continue
        times = published[event["id"]], _begin(event)
        if start <= times[0] and times[1] <= end:
            heights = lanes.index(LEARNER) + 0.25, lanes.index(event["pid"]) - 0.38
            axes.plot(times, heights, color=COLOURS["publish"], linewidth=0.8, alpha=0.7)


def _lane_names(events: list[dict[str, Any]]) -> dict[int, str]:
    named = [e for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    return {event["pid"]: event["args"]["name"] for event in named}


def _begin(event: dict[str, Any]) -> float:
    return float(event["ts"]) / 1e6


def _length(event: dict[str, Any]) -> float:
    return float(event["dur"]) / 1e6


if __name__ == "__main__":
    sys.exit(main())
