"""Student's t distribution for whole degrees of freedom, which seeds minus one always are."""

from __future__ import annotations

import math


def two_sided_p(t: float, freedom: int) -> float:
    """The probability of a statistic at least as far from zero as `t`."""
    if freedom < 1:
        raise ValueError(f"freedom is {freedom}, expected 1 or more")
    if math.isinf(t):
        return 0.0
    return max(0.0, 1.0 - _within(abs(t), freedom))


def quantile(level: float, freedom: int) -> float:
    """The t within which, on both sides of zero, `level` of the distribution lies."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level!r}, expected more than 0 and less than 1")
    low, high = 0.0, 1.0
    while _within(high, freedom) < level:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """The probability between -t and t: a finite sum in the angle whose tangent is t / sqrt(n)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    if freedom % 2:
        term, total = cosine, 0.0
        for k in range(1, freedom, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        return 2 / math.pi * (angle + sine * total)
    term, total = 1.0, 0.0
    for k in range(0, freedom, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return sine * total
