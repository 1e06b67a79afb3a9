"""What the collection benchmark found, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.collect_case import WORKERS, Case


@dataclass
class Row:
    """One contestant in one case: frames a second in each round, or why there are none."""

    case: Case
    contestant: str
    setting: str = ""
    fps: list[float] = field(default_factory=list)
    problem: str = ""
    tried: dict[str, float | str] = field(default_factory=dict)  # setting: its fps or problem

    @property
    def key(self) -> tuple[str, int, str, str]:
        return (self.case.env, self.case.num_envs, self.case.mode, self.contestant)


@dataclass
class StartUp:
    """Seconds from construction to the first batch: in a fresh program, and once more in it."""

    case: Case
    contestant: str
    first_s: list[float] = field(default_factory=list)
    second_s: list[float] = field(default_factory=list)
    problem: str = ""


class Rows:
    """All rows, and the ratios between them."""

    def __init__(self, rows: Iterable[Row]):
        self.by_key = {row.key: row for row in rows}

    def __iter__(self) -> Any:
        return iter(self.by_key.values())

    def ratio(self, row: Row, *, contestant: str = "", mode: str = "") -> float | None:
        """`row` over its counterpart, round by round; the median. None where one is missing."""
        env, num_envs, own_mode, own_name = row.key
        other = self.by_key.get((env, num_envs, mode or own_mode, contestant or own_name))
        if other is None or not row.fps or not other.fps:
            return None
        return median(ours / theirs for ours, theirs in zip(row.fps, other.fps, strict=False))

    def ratios(self, row: Row) -> dict[str, float | None]:
        return {
            "to_bare": self.ratio(row, contestant="bare"),
            "to_torchrl": self.ratio(row, contestant="torchrl"),
            "to_single": None if row.case.mode == "single" else self.ratio(row, mode="single"),
        }


def fps_table(rows: Rows) -> Table:
    """A section for each case."""
    shown = Table(title=f"Frames a second: environments a worker, one process or {WORKERS} workers")
    for column in ("environment", "envs", "mode", "contestant"):
        shown.add_column(column, no_wrap=True)
    for column in ("frames/s", "min to max", "÷ bare", "÷ torchrl", "÷ single"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("setting, or what is wrong")
    previous = None
    for row in rows:
        if row.case != previous:
            shown.add_section()
        place = (row.case.env, str(row.case.num_envs), row.case.mode)
        ratios = rows.ratios(row).values()
        shown.add_row(
            *(place if row.case != previous else ("", "", "")),
            row.contestant,
            f"{median(row.fps):,.0f}" if row.fps else "-",
            f"{min(row.fps):,.0f} to {max(row.fps):,.0f}" if row.fps else "",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            "; ".join(filter(None, (row.setting, row.problem))),
        )
        previous = row.case
    return shown


def start_table(starts: list[StartUp]) -> Table:
    """Ours over torchrl's, by median."""
    shown = Table(title=f"Start-up with {WORKERS} workers: construction to first batch, s")
    for column in (
        "mode",
        "contestant",
        "in a new program",
        "÷ torchrl",
        "again in it",
        "problem",
    ):
        shown.add_column(column)
    for start in starts:
        peer = next((s for s in starts if s.case == start.case and s.contestant == "torchrl"), None)
        both = peer is not None and peer.first_s and start.first_s
        shown.add_row(
            start.case.mode,
            start.contestant,
            f"{median(start.first_s):.2f}" if start.first_s else "-",
            f"{median(start.first_s) / median(peer.first_s):.2f}" if both and peer else "",
            f"{median(start.second_s):.2f}" if start.second_s else "-",
            start.problem,
        )
    return shown


NOTES = """\
÷ bare, ÷ torchrl: over that contestant in the same case, round by round, median.
÷ single: over the same contestant in one process, which says what the workers bring.
bare with workers: that many bare loops at once, added up.
sb3 and gymnasium with workers: a process for each of all the workers' environments.
A step that only resets is not counted as a frame."""


def show(rows: Rows, starts: list[StartUp]) -> None:
    """Print all tables."""
    console = Console(width=170)
    console.print(fps_table(rows))
    if starts:
        console.print(start_table(starts))
    print(NOTES)


def save(rows: Rows, starts: list[StartUp], about: dict[str, Any], file: Path) -> None:
    """Write everything that was measured, with the ratios."""
    file.parent.mkdir(parents=True, exist_ok=True)
    results = [
        {**asdict(row), "fps_median": median(row.fps) if row.fps else None, **rows.ratios(row)}
        for row in rows
    ]
    report = {**about, "results": results, "start_up": [asdict(start) for start in starts]}
    file.write_text(json.dumps(report, indent=2))
    print(f"saved {file}")
