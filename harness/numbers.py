"""Numbers as people read them: without exponents."""

from __future__ import annotations

import math


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
