"""One row of the table: an option of a framework, what it says, and how it is run here."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from docs.max_staleness.record import Record

Run = Callable[[Record], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Setup:
    """An option that limits staleness, at one setting.

    promise: the framework's own words, from `source`, a file and its lines.
    bound: the most that an age can be by the framework's own words or formula, as the table has it;
        `most` is its value, or None.
    theirs: what of the framework runs; ours: what is a model of it.
    """

    framework: str
    option: str
    limit: int
    unit: str
    measured_at: str
    promise: str
    source: str
    bound: str
    most: int | None
    theirs: str
    ours: str
    run: Run
