"""Curves over frames or seconds: on one grid, with bands, and never beyond where a run ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.statistics.estimates import (
    LEVEL,
    Measure,
    Strata,
    checked,
    interval,
    iqm,
    resample,
)

NUM_RESAMPLES = 2_000  # of curves: bands are read by eye


@dataclass(frozen=True)
class Band:
    """A curve and its interval, point by point; NaN where not every seed has one."""

    grid: np.ndarray
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_seeds: int


@dataclass(frozen=True)
class Profile:
    """Which share of the runs scores more than each threshold."""

    thresholds: np.ndarray
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_seeds: int


def trailing_mean(x: np.ndarray, y: np.ndarray, width: float) -> np.ndarray:
    """At each point the mean of the points of the last `width`, itself among them."""
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
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if not len(x):
        return np.full(len(grid), np.nan)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    last = np.append(x[1:] != x[:-1], True)
    return np.interp(grid, x[last], y[last], left=np.nan, right=np.nan)


def band(
    curves: Sequence[np.ndarray] | np.ndarray,
    grid: np.ndarray,
    measure: Measure = iqm,
    *,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    rng_seed: int = 0,
) -> Band:
    """One strategy's curve: `curves` are [seeds, grid], of which whole ones are resampled.

    Where a seed has no value the band has none: a mean over the longer runs alone would mislead.
    """
    curves = np.atleast_2d(np.asarray(curves, dtype=np.float64))
    seeds = len(curves)
    value, low, high = (np.full(len(grid), np.nan) for _ in range(3))
    covered = np.isfinite(curves).all(axis=0)
    if covered.any():
        there = curves[:, covered]
        value[covered] = measure(there.T)
        if seeds > 1:
            found = resample([there], measure, num_resamples=num_resamples, rng_seed=rng_seed)
            low[covered], high[covered] = interval(found, level)
    return Band(grid, value, low, high, seeds)


def profile(
    strata: Strata,
    thresholds: np.ndarray,
    *,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    rng_seed: int = 0,
) -> Profile:
    """Performance profile: the share of runs above each threshold, the mean over tasks."""
    above = [scores[:, None] > thresholds for scores in checked(strata)]
    share = np.mean([rows.mean(axis=0) for rows in above], axis=0)
    fewest = min(len(rows) for rows in above)
    low = high = np.full(len(thresholds), np.nan)
    if fewest > 1:
        rng = np.random.default_rng(rng_seed)
        found = np.zeros((num_resamples, len(thresholds)))
        for rows in above:
            n = len(rows)
            drawn = rng.multinomial(n, np.full(n, 1 / n), size=num_resamples)
            found += drawn @ rows / n / len(above)
        low, high = interval(found, level)
    return Profile(thresholds, share, low, high, fewest)
