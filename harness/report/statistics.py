"""Point estimates of scores with bootstrap intervals; the unit of replication is the seed.

Scores come as *strata*: a list with one array of scores for each task, one score for each seed.
Everything random starts from a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

LEVEL = 0.95  # of every interval
NUM_RESAMPLES = 10_000
FEW_SEEDS = 10  # below this, percentile intervals are known to be too narrow

Strata = Sequence[np.ndarray]
Measure = Callable[[np.ndarray], np.ndarray]  # of the scores along the last axis


@dataclass(frozen=True)
class Estimate:
    """A value and its interval, which is NaN for one seed or none."""

    value: float
    low: float
    high: float
    num_seeds: int  # of the task with the fewest

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def mean(scores: np.ndarray) -> np.ndarray:
    """The mean of all scores."""
    return np.mean(scores, axis=-1)


def median(scores: np.ndarray) -> np.ndarray:
    """The median of all scores; several tasks count as one pool."""
    return np.median(scores, axis=-1)


def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean: the mean without the lowest and the highest quarter of the scores.

    The quarter is rounded down to whole scores: one of five at each end, none of three.
    """
    scores = np.asarray(scores)
    cut = scores.shape[-1] // 4
    return np.mean(np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut], axis=-1)


def optimality_gap(target: float) -> Measure:
    """The mean shortfall from `target`; a score above the target counts as the target."""
    if not math.isfinite(target):
        raise ValueError(f"target is {target!r}, expected a finite number")
    return lambda scores: np.mean(np.maximum(target - np.asarray(scores), 0.0), axis=-1)


MEASURES: dict[str, Measure] = {"mean": mean, "median": median, "iqm": iqm}


def estimate(
    strata: Strata,
    measure: Measure = iqm,
    *,
    num_resamples: int = NUM_RESAMPLES,
    rng_seed: int = 0,
) -> Estimate:
    """`measure` of all scores with its percentile interval; seeds are resampled within tasks."""
    strata = checked(strata)
    fewest = min(len(scores) for scores in strata)
    value = float(measure(np.concatenate(strata)))
    if fewest < 2:
        return Estimate(value, math.nan, math.nan, fewest)
    resampled = resample(strata, measure, num_resamples=num_resamples, rng_seed=rng_seed)
    low, high = interval(resampled)
    return Estimate(value, float(low), float(high), fewest)


def student(scores: Sequence[float]) -> Estimate:
    """The mean with Student's interval, which is what the tests of differences assume."""
    values = checked([np.asarray(scores)])[0]
    value, num_seeds = float(values.mean()), len(values)
    if num_seeds < 2:
        return Estimate(value, math.nan, math.nan, num_seeds)
    half = float(stats.sem(values) * stats.t.ppf((1 + LEVEL) / 2, num_seeds - 1))
    return Estimate(value, value - half, value + half, num_seeds)


def resample(
    strata: Strata, measure: Measure, *, num_resamples: int = NUM_RESAMPLES, rng_seed: int = 0
) -> np.ndarray:
    """`measure` of each of `num_resamples` stratified resamples."""
    rng = np.random.default_rng(rng_seed)
    drawn = [
        scores[rng.integers(len(scores), size=(num_resamples, len(scores)))] for scores in strata
    ]
    return measure(np.concatenate(drawn, axis=1))


@lru_cache(maxsize=4)
def draw_counts(sizes: tuple[int, ...], num_resamples: int) -> list[np.ndarray]:
    """How often each seed is drawn in each resample: [resamples, seeds] for groups of such sizes.

    The same for the same sizes: a report draws once for all of its settings.
    """
    rng = np.random.default_rng(0)
    return [
        rng.multinomial(size, np.full(size, 1 / size), size=num_resamples).astype(np.float64)
        for size in sizes
    ]


def interval(resampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The percentile interval along the first axis."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail], axis=0)
    return low, high


def caution(num_seeds: int) -> str:
    """What a reader must know about an interval of so few seeds; empty if nothing."""
    if num_seeds == 0:
        return "no seed: no number"
    if num_seeds == 1:
        return "one seed: no interval"
    if num_seeds < FEW_SEEDS:
        return f"{num_seeds} seeds: bootstrap intervals are likely too narrow"
    return ""


def checked(strata: Strata) -> list[np.ndarray]:
    """The scores as arrays of finite floats, or a `ValueError`."""
    if isinstance(strata, np.ndarray) and strata.ndim == 1:
        raise ValueError(
            f"strata is an array of {len(strata)} scores, expected a list of arrays, one for "
            "each task; a single task is [scores]"
        )
    arrays = [np.asarray(scores, dtype=np.float64) for scores in strata]
    if not arrays or any(scores.ndim != 1 or not len(scores) for scores in arrays):
        shapes = [scores.shape for scores in arrays]
        raise ValueError(f"strata has shapes {shapes}, expected one row of scores for each task")
    for task, scores in enumerate(arrays):
        if not np.isfinite(scores).all():
            raise ValueError(f"task {task} has scores {scores.tolist()}, expected finite numbers")
    return arrays
