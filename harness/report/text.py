"""Numbers and lists in words, and what the command is doing."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable

from harness.numbers import readable

NONE = "–"
MOST_NAMES = 12  # of a list


def number(value: float, digits: int = 4) -> str:
    """A number as text, rounded for a reader."""
    if not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 10_000 else readable(value, digits)


def signed(value: float) -> str:
    """The same with its sign."""
    return number(value) if value < 0 else f"+{number(value)}"


def with_interval(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """A value and, where there is one, its interval."""
    if math.isfinite(value) and math.isfinite(low) and math.isfinite(high):
        return f"{number(value)} [{number(low)}, {number(high)}]"
    return number(value)


def joined(names: Iterable[str]) -> str:
    """`a, b and c`; of very many the first ones."""
    names = list(names)
    if len(names) > MOST_NAMES:
        names = [*names[:MOST_NAMES], f"{len(names) - MOST_NAMES} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def printable(text: str) -> str:
    """Text for a terminal, on one line: it may come from a file that nobody knows."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def show_progress(text: str) -> None:
    """Say what the command is doing: `text` replaces the last line of the terminal, if any."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns - 1
        shown = printable(text)[:columns]
        print(f"\r{shown:<{columns}}", end="", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print it, also where `| head` has seen enough of it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
