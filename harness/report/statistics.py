"""Estimates of scores, their intervals, and tests; the unit of replication is the seed.

Everything random starts from a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import special  # scipy.stats takes a second and 50 MB to import

LEVEL = 0.95  # of every interval
NUM_RESAMPLES = 10_000
BAND_RESAMPLES = 2_000  # bands are read by eye
FEW_SEEDS = 10  # below this, percentile intervals are known to be too narrow
ROUNDING = 1e-12  # differences that agree to this share of the scores' size have no spread

Measure = Callable[[np.ndarray], np.ndarray]  # of the scores along the last axis


class Estimate(NamedTuple):
    """A value and its interval, which is NaN for one seed or none."""

    value: float
    low: float
    high: float
    seeds: int

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def mean(scores: np.ndarray) -> np.ndarray:
    """The mean of all scores."""
    return np.mean(scores, axis=-1)


def median(scores: np.ndarray) -> np.ndarray:
    """The median of all scores."""
    return np.median(scores, axis=-1)


def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean: the mean without the lowest and the highest quarter of the scores.

    The quarter is rounded down to whole scores: one of five at each end, none of three.
    """
    count = scores.shape[-1]
    cut = count // 4
    ordered = np.partition(scores, (cut, count - cut - 1), axis=-1)
    return np.mean(ordered[..., cut : count - cut], axis=-1)


def optimality_gap(target: float) -> Measure:
    """The mean shortfall from `target`; a score above the target counts as the target."""
    if not math.isfinite(target):
        raise ValueError(f"target is {target!r}, expected a finite number")
    return lambda scores: np.mean(np.maximum(target - np.asarray(scores), 0.0), axis=-1)


MEASURES: dict[str, Measure] = {"mean": mean, "median": median, "iqm": iqm}


# -- intervals


def estimate(
    scores: np.ndarray, measure: Measure = iqm, *, resamples: int = NUM_RESAMPLES, rng_seed: int = 0
) -> Estimate:
    """`measure` of the scores with its percentile interval."""
    value, seeds = float(measure(scores)), len(scores)
    if seeds < 2:
        return Estimate(value, math.nan, math.nan, seeds)
    low, high = interval(measure(resample(scores, resamples, rng_seed)))
    return Estimate(value, float(low), float(high), seeds)


def resample(scores: np.ndarray, resamples: int = NUM_RESAMPLES, rng_seed: int = 0) -> np.ndarray:
    """Scores drawn with replacement: a row for each resample."""
    return np.asarray(scores)[draw_places(len(scores), resamples, rng_seed)]


@lru_cache(maxsize=4)
def draw_places(size: int, resamples: int, rng_seed: int) -> np.ndarray:
    """Which of `size` scores are drawn: a row for each resample, the same for the same size."""
    return np.random.default_rng(rng_seed).integers(size, size=(resamples, size))


@lru_cache(maxsize=4)
def draw_counts(size: int, resamples: int) -> np.ndarray:
    """How often each of `size` seeds is drawn: a row for each resample, the same for each call."""
    shares = np.full(size, 1 / size)
    drawn = np.random.default_rng(0).multinomial(size, shares, size=resamples)
    return drawn.astype(np.float64)


def interval(resampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The percentile interval along the first axis."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail], axis=0)
    return low, high


def student(scores: Sequence[float] | np.ndarray) -> Estimate:
    """The mean with Student's interval, which is what the tests of differences assume."""
    value, seeds = float(np.mean(scores)), len(scores)
    if seeds < 2:
        return Estimate(value, math.nan, math.nan, seeds)
    half = float(np.std(scores, ddof=1) / seeds**0.5 * student_quantile((1 + LEVEL) / 2, seeds - 1))
    return Estimate(value, value - half, value + half, seeds)


def student_quantile(share: float, degrees: int) -> float:
    """The value below which Student's distribution has this share."""
    return float(special.stdtrit(degrees, share))


# -- tests


def paired_test(left: np.ndarray, right: np.ndarray) -> tuple[Estimate, float]:
    """Mean difference with Student's interval, and the p of Student's paired test.

    A bootstrap of a few pairs would give intervals that are too narrow to decide by.
    """
    differences = left - right
    pairs = len(differences)
    value = float(differences.mean()) if pairs else math.nan
    if pairs < 2:
        return Estimate(value, math.nan, math.nan, pairs), math.nan
    rounding = ROUNDING * float(np.abs([left, right]).max())
    if differences.std(ddof=1) <= rounding:
        value = value if abs(value) > rounding else 0.0
        return Estimate(value, value, value, pairs), math.nan if value else 1.0
    error = _standard_error(differences)
    low, high = (
        student_quantile(share, pairs - 1) * error + value
        for share in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    )
    p = 2 * special.stdtr(pairs - 1, -abs(value / error))
    return Estimate(value, low, high, pairs), float(p)


def equivalence_test(left: np.ndarray, right: np.ndarray, margin: float) -> float:
    """The p of two one-sided paired t-tests that the mean difference lies within the margin."""
    differences = left - right
    if len(differences) < 2 or not margin > 0:
        return math.nan
    rounding = ROUNDING * float(np.abs([left, right]).max())
    if differences.std(ddof=1) <= rounding:
        return 0.0 if abs(float(differences.mean())) <= rounding else math.nan
    mean, error = float(differences.mean()), _standard_error(differences)
    above = special.stdtr(len(differences) - 1, -(mean + margin) / error)
    below = special.stdtr(len(differences) - 1, (mean - margin) / error)
    return float(max(above, below))


def _standard_error(values: np.ndarray) -> float:
    """Of the mean of several values."""
    count = len(values)
    variance = float(np.mean(np.square(values - values.mean()))) * (count / (count - 1))
    return math.sqrt(variance / count)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: the smallest of m is multiplied by m, the next by m - 1, and so on.

    A NaN is no test: it stays NaN and does not count.
    """
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(len(p), np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    return [float(value) for value in adjusted]


# -- curves of several seeds


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
        counts = draw_counts(seeds, BAND_RESAMPLES)
        low, high = interval(counts @ rows / seeds)
    value = rows.mean(axis=0)
    return pd.DataFrame(
        {"x": grid[covered], "value": value, "low": low, "high": high, "seeds": seeds}
    )
