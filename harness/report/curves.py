"""Curves of several seeds on one grid, and performance profiles, with bootstrap bands.

A band is a table with the columns x, value, low, high and seeds, without the points where not every
seed has a value.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.report.statistics import draw_counts, interval

NUM_RESAMPLES = 2_000  # bands are read by eye


def trailing_mean(x: np.ndarray, y: np.ndarray, width: float) -> np.ndarray:
    """At each point the mean of the points of the last `width`, including itself."""
    first = np.searchsorted(x, x - width, side="right")
    first = np.minimum(first, np.arange(len(x)))
    sums = np.concatenate([[0.0], np.cumsum(y)])
    upto = np.arange(1, len(x) + 1)
    return (sums[upto] - sums[first]) / (upto - first)


def interpolate(x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """`y` on the grid, linear between points; NaN before the first and after the last.

    x ascends. Of several points at one x the last counts.
    """
    last = np.append(x[1:] != x[:-1], True)
    return np.interp(grid, x[last], y[last], left=np.nan, right=np.nan)


def band(curves: np.ndarray, grid: np.ndarray) -> pd.DataFrame:
    """The mean of one setting's curves, [seeds, grid], of which whole ones are resampled.

    Where a seed has no value the band has none: a mean of the longer runs alone would mislead.
    """
    covered = np.isfinite(curves).all(axis=0)
    rows, seeds = curves[:, covered], len(curves)
    low = high = np.full(rows.shape[1], np.nan)
    if seeds > 1 and covered.any():
        (counts,) = draw_counts((seeds,), NUM_RESAMPLES)
        low, high = interval(counts @ rows / seeds)
    value = rows.mean(axis=0)
    return pd.DataFrame(
        {"x": grid[covered], "value": value, "low": low, "high": high, "seeds": seeds}
    )


def profile(scores: np.ndarray, thresholds: np.ndarray) -> pd.DataFrame:
    """Performance profile: the share of runs above each threshold."""
    return band((scores[:, None] > thresholds).astype(float), thresholds)
