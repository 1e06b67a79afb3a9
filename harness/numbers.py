"""Numbers as people read them: without exponents, and of the frames that were not used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MUCH = 0.1  # share of unused frames from which on a run says so


def readable(value: float, digits: int = 3) -> str:
    """A number with so many significant digits: 0.25, 12.3, 1,020. Tiny ones keep an exponent."""
    if not math.isfinite(value) or not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits}g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def plural(number: int, one: str, several: str) -> str:
    """The form of a word that goes with the number."""
    return one if number == 1 else several


def count(things: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{things} {plural(things, what, f'{what}s')}"


@dataclass(frozen=True)
class Unused:
    """Frames that workers made and the learner did not learn from."""

    refused: int  # by the learner: too old for `max_lag`, or of random actions
    lost: int  # by the collector, for instance with a worker that died
    total: int  # these and all that were learned from

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Unused:
        """Of a run's summary, or of a record of it."""
        refused, lost, delivered = (
            int(metrics.get(name) or 0)
            for name in ("policy/dropped", "collector/dropped", "collector/delivered")
        )
        return cls(refused, lost, delivered + lost)

    @property
    def count(self) -> int:
        return self.refused + self.lost

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.count / self.total if self.total else 0.0

    @property
    def is_much(self) -> bool:
        """Whether it is more than a tenth."""
        return self.share > MUCH

    def __str__(self) -> str:
        return f"{self.count:,} ({self.share:.0%})"
