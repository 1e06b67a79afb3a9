"""A picture of a run's dashboard: `python -m harness.logging.picture <run dir>` writes an SVG file.

It is drawn from the run's records. With `logger=trace` the run also knows what its workers did.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI

from harness.config.resumed import read_options
from harness.files import one_line, read_text, write_atomic
from harness.logging.dashboard import WINDOW, Dashboard
from harness.logging.live import LOOK_S
from harness.logging.trace import APPLIED, FIRST_WORKER, WORK, read_trace
from harness.metrics import PHASES
from harness.options.errors import ConfigError

FONT = re.compile(r"@font-face\s*\{[^}]*\}\s*")  # rich's comes from another server
Stages = Callable[[float], Sequence[str]]  # what workers are doing at a time


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m harness.logging.picture", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run's directory")
    parser.add_argument("--out", type=Path, help="the .svg to write; <run dir>/dashboard.svg")
    parser.add_argument("--width", type=int, default=100, help="of the terminal, in columns; 100")
    parser.add_argument(
        "--at", type=float, default=1.0, metavar="SHARE", help="of the run's records; 1: its end"
    )
    options = parser.parse_args(arguments)
    out = options.out or options.run_dir / "dashboard.svg"
    try:
        write_atomic(out, picture(dashboard(options.run_dir, at=options.at), width=options.width))
    except (ConfigError, ValueError, OSError, LookupError, TypeError) as error:
        print(f"picture: {one_line(error)}", file=sys.stderr)
        return 2
    print(out)
    return 0


def dashboard(run_dir: Path, *, at: float = 1.0) -> Dashboard:
    """The dashboard as it was after a share of the run's records."""
    options = read_options(run_dir)
    text = read_text(run_dir / "metrics.jsonl")
    records = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    count = round(at * len(records))
    if not 0 < count <= len(records):
        raise ValueError(f"at={at:g} of {len(records)} records in {run_dir}: there is none")
    shown = Dashboard(options["total_frames"], collector=options["collector"]["name"])
    times = [float(record["time"]) for record in records]
    stages: Stages = _no_stages
    is_virtual = options["collector"]["name"] == "simulated"  # so is the time of its trace
    if (trace := run_dir / "trace.json").exists() and not is_virtual:
        times, stages = _from_trace(trace, len(records))
    spent = {
        phase: list(accumulate(record.get(f"time/{phase}_s", 0.0) for record in records))
        for phase in PHASES
    }
    for record in records[:count]:
        shown.record(record["step"], _numbers(record), record.get("episode/return", float("nan")))
    end, place = times[count - 1], 0
    for number in range(WINDOW, -1, -1):
        now = end - number * LOOK_S
        while place + 1 < count and times[place + 1] <= now:
            place += 1
        if times[place] <= now:
            so_far = {phase: values[place] for phase, values in spent.items()}
            shown.sample(now, records[place]["step"], so_far, stages(now))
    return shown


def picture(shown: Dashboard, *, width: int) -> str:
    """The dashboard as an SVG file that needs nothing else."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    return FONT.sub("", console.export_svg(title="lockstep", theme=MONOKAI, unique_id="lockstep"))


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if isinstance(value, int | float)}


def _no_stages(at_s: float) -> Sequence[str]:
    return []


def _from_trace(file: Path, num_records: int) -> tuple[list[float], Stages]:
    """When each record was written, by the trace's clock, and what workers did at a time."""
    events = read_trace(file)
    times = [
        event["ts"] / 1e6 for event in events if event["ph"] == "C" and event["name"] == "frames"
    ]
    if len(times) < num_records:
        raise ValueError(f"{file} ends before the run's records do")
    spans = [
        (event["pid"] - FIRST_WORKER, event["tid"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in events
        if event["ph"] == "X" and event["pid"] >= FIRST_WORKER
    ]
    acted = {worker for worker, tid, *_ in spans if tid == WORK}
    if not acted:  # workers elsewhere, of which only applied versions are known
        return times, _no_stages
    num_workers = max(worker for worker, *_ in spans) + 1

    def stages(at_s: float) -> list[str]:
        found = ["idle"] * num_workers
        for stage, track in (("acting", WORK), ("taking weights", APPLIED)):
            for worker, tid, start, lasts in spans:
                if tid == track and start <= at_s < start + lasts:
                    found[worker] = stage
        return found

    return times, stages


if __name__ == "__main__":
    sys.exit(main())
