"""What the collection benchmark measured, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import contest
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

    def __iter__(self) -> Iterator[Row]:
        return iter(self.by_key.values())

    def ratios(self, row: Row) -> dict[str, float | None]:
        """The row over its counterparts."""
        env, size, mode, name = row.key
        keys = {"bare": (env, size, mode, "bare"), "torchrl": (env, size, mode, "torchrl")}
        keys["single"] = (env, size, "" if mode == "single" else "single", name)
        others = {name: self.by_key.get(key) for name, key in keys.items()}
        return {
            f"to_{name}": contest.ratio(dict(enumerate(row.fps)), dict(enumerate(other.fps)))
            if other is not None
            else None
            for name, other in others.items()
        }


NOTES = """\
÷ bare, ÷ torchrl: over that contestant in the same case, round by round, median.
÷ single: over the same contestant in one process, which says what the workers bring.
bare with workers: that many bare loops at once, added up.
sb3 and gymnasium with workers: a process for each of all the workers' environments.
A step that only resets is not counted as a frame."""


def show(rows: Rows, starts: Sequence[StartUp]) -> None:
    """Print all tables."""
    console = Console(width=170)
    heads = ["environment", "envs", "mode", "contestant", "frames/s", "min to max"]
    heads += ["÷ bare", "÷ torchrl", "÷ single", "setting, or what is wrong"]
    cells = [
        [
            *(row.case.env, str(row.case.num_envs), row.case.mode, row.contestant),
            *contest.rates(row.fps),
            *map(contest.cell, rows.ratios(row).values()),
            "; ".join(filter(None, (row.setting, row.problem))),
        ]
        for row in rows
    ]
    title = f"Frames a second: environments a worker, one process or {WORKERS} workers"
    console.print(contest.table(title, heads, cells, places=3, numbers=5))
    if starts:
        title = f"Start-up with {WORKERS} workers: construction to first batch, s"
        heads = ["mode", "contestant", "in a new program", "÷ torchrl", "again in it", "problem"]
        console.print(contest.table(title, heads, _starts(starts), places=1, numbers=3))
    print(NOTES)


def _starts(starts: Sequence[StartUp]) -> Iterator[list[str]]:
    for start in starts:
        first, second = (median(s) if s else None for s in (start.first_s, start.second_s))
        peers = [
            median(peer.first_s)
            for peer in starts
            if (peer.case, peer.contestant) == (start.case, "torchrl") and peer.first_s
        ]
        to_peer = first / peers[0] if first is not None and peers else None
        times = [contest.cell(time) or "-" for time in (first, second)]
        mode, name = start.case.mode, start.contestant
        yield [mode, name, times[0], contest.cell(to_peer), times[1], start.problem]


def save(rows: Rows, starts: list[StartUp], about: Mapping[str, Any], file: Path) -> None:
    """Write everything that was measured, with the ratios."""
    results = [
        {**asdict(row), "fps_median": median(row.fps) if row.fps else None, **rows.ratios(row)}
        for row in rows
    ]
    contest.save(file, about, results, start_up=[asdict(start) for start in starts])
