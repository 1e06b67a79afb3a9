"""Checks of single settings: each raises a ValueError of one line that says what would do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise unless `value` is one of `choices`; the error names the nearest."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}{nearest(value, choices)}")


def nearest(value: object, choices: Iterable[str]) -> str:
    """Say what a mistyped `value` may have meant: the nearest choice, or all if they are few."""
    choices = list(choices)
    close = difflib.get_close_matches(str(value), choices, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    if len(choices) > 20:
        return meant or "; no known name is near it"
    return f", expected one of {', '.join(choices)}{meant}"


def at_least(name: str, value: float, least: float) -> None:
    """Raise unless `value` is `least` or more (which NaN is not)."""
    if not value >= least:
        raise ValueError(f"{name} is {value!r}, expected {least} or more")


def above(name: str, value: float, bound: float) -> None:
    """Raise unless `value` is greater than `bound` (which NaN is not)."""
    if not value > bound:
        raise ValueError(f"{name} is {value!r}, expected more than {bound}")


def between(name: str, value: float, low: float, high: float) -> None:
    """Raise unless `low` <= `value` <= `high` (which NaN is not)."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, expected {low} to {high}")
