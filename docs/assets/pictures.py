"""Draws docs/dashboard.svg and docs/timeline.svg from a finished run with `logger=trace`.

    python docs/assets/pictures.py dashboard RUN_DIR docs/dashboard.svg
    python docs/assets/pictures.py timeline RUN_DIR docs/timeline.svg --start 3 --seconds 1

The dashboard is drawn from the run's records, the stages of its workers from its trace. The
timeline is a part of the trace: a lane for the learner, and for each worker one with its batches
and the versions that it applied. A line leads from each publish to every worker that applied it.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.terminal_theme import MONOKAI

from harness.config.stored import read_options
from harness.logging.dashboard import WINDOW, Dashboard
from harness.logging.display import LOOK_S
from harness.logging.trace import APPLIED, FIRST_WORKER, LEARNER, WORK
from harness.measures import PHASES

FONT = re.compile(r"@font-face\s*\{[^}]*\}\s*")  # rich's comes from another server
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
STYLE: Any = {"svg.hashsalt": "lockstep", "svg.fonttype": "none", "font.size": 9}

Event = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", choices=["dashboard", "timeline"])
    parser.add_argument("run_dir", type=Path, help="a run's directory, with a trace.json")
    parser.add_argument("out", type=Path, help="the .svg to write")
    parser.add_argument("--width", type=int, default=100, help="dashboard: columns; 100")
    parser.add_argument("--at", type=float, default=1.0, help="dashboard: share of the run; 1")
    parser.add_argument("--start", type=float, default=0.0, help="timeline: first second; 0")
    parser.add_argument("--seconds", type=float, default=1.0, help="timeline: how long; 1")
    options = parser.parse_args(arguments)
    events = json.loads((options.run_dir / "trace.json").read_text())
    if options.picture == "dashboard":
        text = printed(dashboard(options.run_dir, events, options.at), options.width)
    else:
        text = timeline(events, options.start, options.start + options.seconds)
    options.out.write_text(text)


def dashboard(run_dir: Path, events: list[Event], at: float) -> Dashboard:
    """The dashboard as it was after a share of the run's records."""
    options = read_options(run_dir)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [begin(e) for e in events if e["ph"] == "C" and e["name"] == "frames"]
    spent = {
        phase: list(accumulate(record.get(f"time/{phase}_s", 0.0) for record in records))
        for phase in PHASES
    }
    shown = Dashboard(options["total_frames"], collector=options["collector"]["name"])
    count = round(at * len(records))
    for record in records[:count]:
        numbers = {name: value for name, value in record.items() if value is not None}
        shown.record(record["step"], numbers, numbers.get("episode/return", float("nan")))
    for number in range(WINDOW, -1, -1):
        now = times[count - 1] - number * LOOK_S
        before = [place for place in range(count) if times[place] <= now]
        if before:
            so_far = {phase: values[before[-1]] for phase, values in spent.items()}
            shown.sample(now, records[before[-1]]["step"], so_far, stages(events, now))
    return shown


def stages(events: list[Event], now: float) -> list[str]:
    """What each worker did at a time."""
    spans = [event for event in events if event["ph"] == "X" and event["pid"] >= FIRST_WORKER]
    found = ["idle"] * (1 + max(span["pid"] for span in spans) - FIRST_WORKER)
    for stage, track in (("acting", WORK), ("taking weights", APPLIED)):
        for span in spans:
            if span["tid"] == track and begin(span) <= now < begin(span) + length(span):
                found[span["pid"] - FIRST_WORKER] = stage
    return found


def printed(shown: Dashboard, width: int) -> str:
    """The dashboard as an SVG file that needs nothing else."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    return FONT.sub("", console.export_svg(title="lockstep", theme=MONOKAI, unique_id="lockstep"))


def timeline(events: list[Event], start: float, end: float) -> str:
    """The spans of a trace between two times, as the text of an SVG file."""
    spans = [event for event in events if event["ph"] == "X"]
    shown = [s for s in spans if begin(s) < end and begin(s) + length(s) > start]
    named = [e for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    names = {event["pid"]: event["args"]["name"] for event in named}
    lanes = sorted({span["pid"] for span in shown} | {LEARNER})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 1.2 + 0.55 * len(lanes)), layout="constrained")
        axes = figure.subplots()
        for lane, pid in enumerate(lanes):
            draw_lane(axes, lane, [span for span in shown if span["pid"] == pid])
        draw_versions(axes, events, lanes, start, end)
        axes.set_xlim(start, end)
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_yticks(range(len(lanes)), [names[pid] for pid in lanes])
        axes.set_xlabel("seconds since the start of the run")
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        found = {span["name"] for span in shown}
        used = [name for name in COLOURS if name in found and name != "apply"]
        patches = [Patch(color=COLOURS[name], label=LABELS.get(name, name)) for name in used]
        figure.legend(handles=patches, loc="outside upper center", ncols=5, frameon=False)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def draw_lane(axes: Axes, lane: int, spans: list[Event]) -> None:
    """The learner's phases, or a worker's batches with the versions that it applied above."""
    for name in sorted({span["name"] for span in spans}):
        chosen = [span for span in spans if span["name"] == name]
        above = chosen[0]["tid"] == APPLIED
        axes.broken_barh(
            [(begin(span), length(span)) for span in chosen],
            (lane - 0.38, 0.14) if above else (lane - 0.2, 0.45),
            facecolor=COLOURS[name],
            edgecolor=COLOURS[name] if above else "white",
            linewidth=0.5,
        )


def draw_versions(
    axes: Axes, events: list[Event], lanes: list[int], start: float, end: float
) -> None:
    """A line from each publish to each worker that applied its version."""
    published = {event["id"]: begin(event) for event in events if event["ph"] == "s"}
    for event in events:
        if event["ph"] == "f" and event["pid"] in lanes and event["id"] in published:
            times = published[event["id"]], begin(event)
            if start <= times[0] and times[1] <= end:
                heights = lanes.index(LEARNER) + 0.25, lanes.index(event["pid"]) - 0.38
                axes.plot(times, heights, color=COLOURS["publish"], linewidth=0.8, alpha=0.7)


def begin(event: Event) -> float:
    """In seconds."""
    return float(event["ts"]) / 1e6


def length(event: Event) -> float:
    """In seconds."""
    return float(event["dur"]) / 1e6


if __name__ == "__main__":
    main()
