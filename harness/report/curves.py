"""Curves of several seeds on one grid, and performance profiles, with bootstrap bands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.report.statistics import Strata, checked, draw_counts, interval

NUM_RESAMPLES = 2_000  # bands are read by eye


@dataclass(frozen=True)
class Band:
    """A curve and its interval, point by point; NaN where not every seed has a value."""

    grid: np.ndarray
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_seeds: int


def trailing_mean(x: np.ndarray, y: np.ndarray, width: float) -> np.ndarray:
    """At each point the mean of the points of the last `width`, including itself."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    first = np.searchsorted(x, x - width, side="right")
    first = np.minimum(first, np.arange(len(x)))
    sums = np.concatenate([[0.0], np.cumsum(y)])
    upto = np.arange(1, len(x) + 1)
    return (sums[upto] - sums[first]) / (upto - first)


def interpolate(x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """`y` on the grid, linear between points; NaN before the first and after the last.

    Points without a finite value are left out, and of several at one x the last counts.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if not len(x):
        return np.full(len(grid), np.nan)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    last = np.append(x[1:] != x[:-1], True)
    return np.interp(grid, x[last], y[last], left=np.nan, right=np.nan)


def band(curves: Sequence[np.ndarray], grid: np.ndarray) -> Band:
    """The mean of one setting's curves, [seeds, grid], of which whole ones are resampled.

    Where a seed has no value the band has none: a mean of the longer runs alone would mislead.
    """
    rows = np.asarray(curves, dtype=np.float64)
    points = np.full((3, len(grid)), np.nan)
    covered = np.isfinite(rows).all(axis=0)
    if covered.any():
        points[:, covered] = _mean_and_interval([rows[:, covered]])
    value, low, high = points
    return Band(grid, value, low, high, len(rows))


def profile(strata: Strata, thresholds: np.ndarray) -> Band:
    """Performance profile: the share of runs above each threshold, the mean over tasks."""
    above = [scores[:, None] > thresholds for scores in checked(strata)]
    value, low, high = _mean_and_interval(above)
    return Band(thresholds, value, low, high, min(map(len, above)))


def _mean_and_interval(tasks: Sequence[np.ndarray]) -> np.ndarray:
    """Value, low and high of the mean over tasks of the mean over seeds, for [seeds, points]."""
    value = np.mean([rows.mean(axis=0) for rows in tasks], axis=0)
    if min(map(len, tasks)) < 2:
        return np.stack([value, *np.full((2, len(value)), np.nan)])
    drawn = draw_counts(tuple(map(len, tasks)), NUM_RESAMPLES)
    means = [counts @ rows / len(rows) for counts, rows in zip(drawn, tasks, strict=True)]
    return np.stack([value, *interval(np.mean(means, axis=0))])
