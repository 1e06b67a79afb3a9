"""A contest of programs, as collect.py and train.py hold: who takes part, and the table at the end.

A contestant runs in a process of its own (`remote.py`, `host.py`). All of them take turns, round
after round, and a ratio compares two of them within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from benchmarks.remote import ROOT, Remote

OUR_PYTHON = Path(sys.executable)
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"

Options = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """A program that takes part.

    settings: what it may be told for a task, to choose the fastest of; none if it takes no part.
    """

    module: str
    what: str
    settings: Callable[[Any], list[Options]]
    is_peer: bool = False

    @property
    def python(self) -> Path:
        return PEER_PYTHON if self.is_peer else OUR_PYTHON

    def start(self) -> Remote:
        """A process of it."""
        return Remote(self.python, self.module)


def say(what: str) -> None:
    """Show progress, beside the results on stdout."""
    print(what, file=sys.stderr, flush=True)


# -- the command line


def names_of(known: Iterable[object]) -> Callable[[str], list[str]]:
    """The type of an option that names some of `known`, with commas."""
    names = [str(name) for name in known]

    def parse_names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected of {', '.join(names)}")
        return chosen

    return parse_names


def add_names(parser: argparse.ArgumentParser, flag: str, known: Iterable[object], default: Any):
    """An option that names some of `known`."""
    names, chosen = (",".join(map(str, those)) for those in (known, default))
    parser.add_argument(flag, type=names_of(known), default=chosen, help=f"of {names}")


def add_flags(parser: argparse.ArgumentParser, known: Mapping[str, Contestant]) -> None:
    """The options of every contest."""
    add_names(parser, "--contestants", known, known)
    parser.add_argument("--no-peers", action="store_true", help="measure only ourselves")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks")


def parse(parser: argparse.ArgumentParser, known: Mapping[str, Contestant]) -> argparse.Namespace:
    """The command line; `contestants` are those that take part. Exits with 2 if one cannot."""
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error(
            f"--rounds {options.rounds} --seconds {options.seconds}: expected both above 0"
        )
    if options.no_peers:
        options.contestants = [name for name in options.contestants if not known[name].is_peer]
    if any(known[name].is_peer for name in options.contestants) and not PEER_PYTHON.exists():
        print("the peers' environment is missing: run `make peers`, or pass --no-peers")
        sys.exit(2)
    return options


# -- what was measured


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Ours over theirs, by round; the median. None if they share no round."""
    shared = [ours[number] / theirs[number] for number in ours if number in theirs]
    return median(shared) if shared else None


def table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, places: int, numbers: int
) -> Table:
    """Rows with the same first `places` cells are a section, which shows them once.

    numbers: so many of the cells after the contestant's name; what follows them is text.
    """
    shown = Table(title=title)
    for i, head in enumerate(heads):
        is_number = places < i <= places + numbers
        is_text = i > places + numbers
        shown.add_column(head, justify="right" if is_number else "left", no_wrap=not is_text)
    for place, those in groupby(rows, lambda row: tuple(row[:places])):
        for i, row in enumerate(those):
            shown.add_row(*(place if i == 0 else [""] * places), *row[places:])
        shown.add_section()
    return shown


def rates(fps: Sequence[float]) -> tuple[str, str]:
    """Two cells: the median of the rounds, and their range."""
    if not fps:
        return "-", ""
    return f"{median(fps):,.0f}", f"{min(fps):,.0f} to {max(fps):,.0f}"


def cell(value: float | None) -> str:
    """A ratio, if there is one."""
    return "" if value is None else f"{value:.2f}"


def save(file: Path, about: Mapping[str, Any], results: Sequence[Any], **more: Any) -> None:
    """Write everything that was measured."""
    machine = {"processor": platform.processor(), "cores": os.cpu_count()}
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "torch": torch.__version__, **about, "results": results, **more}
    file.write_text(json.dumps(content, indent=2))
    print(f"saved {file}")
