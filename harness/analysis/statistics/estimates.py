"""Point estimates of scores, and how far the seeds leave them open: stratified bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
NUM_RESAMPLES = 10_000
FEW_SEEDS = 10  # below this, percentile intervals are known to be too narrow
CHUNK = 2_000_000  # numbers that are held at once while resampling

Strata = Sequence[np.ndarray]
# Of the scores along the last axis.
Measure = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A value and its interval, which is NaN where one seed or none leaves no interval."""

    value: float
    low: float
    high: float
    num_seeds: int  # in the task that has fewest

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def mean(scores: np.ndarray) -> np.ndarray:
    """Of all scores."""
    return np.mean(scores, axis=-1)


def median(scores: np.ndarray) -> np.ndarray:
    """Of all scores; those of several tasks count as one pool."""
    return np.median(scores, axis=-1)


def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean: what is left after a quarter of the scores is cut at each end.

    Whole scores are cut, rounded down: one at each end of five, none of three.
    """
    scores = np.asarray(scores)
    cut = scores.shape[-1] // 4
    return np.mean(np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut], axis=-1)


def optimality_gap(target: float) -> Measure:
    """How far scores stay below `target` on average; more than the target earns nothing."""
    if not math.isfinite(target):
        raise ValueError(f"target is {target!r}, expected a finite number")
    return lambda scores: np.mean(np.maximum(target - np.asarray(scores), 0.0), axis=-1)


MEASURES: dict[str, Measure] = {"mean": mean, "median": median, "iqm": iqm}


def estimate(
    strata: Strata,
    measure: Measure = iqm,
    *,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    rng_seed: int = 0,
) -> Estimate:
    """`measure` of all scores with its percentile interval; seeds are resampled within tasks."""
    strata = checked(strata)
    fewest = min(len(scores) for scores in strata)
    value = float(measure(np.concatenate(strata)))
    if fewest < 2:
        return Estimate(value, math.nan, math.nan, fewest)
    found = resample(strata, measure, num_resamples=num_resamples, rng_seed=rng_seed)
    low, high = interval(found, level)
    return Estimate(value, float(low), float(high), fewest)


def resample(
    strata: Strata, measure: Measure, *, num_resamples: int = NUM_RESAMPLES, rng_seed: int = 0
) -> np.ndarray:
    """`measure` of each of so many stratified resamples. Scores may be curves: [seeds, points].

    A curve is drawn as a whole, so that its points stay together.
    """
    rng = np.random.default_rng(rng_seed)
    points = math.prod(strata[0].shape[1:]) * sum(len(scores) for scores in strata)
    step = max(1, CHUNK // max(points, 1))
    found = []
    for start in range(0, num_resamples, step):
        count = min(step, num_resamples - start)
        drawn = [scores[rng.integers(len(scores), size=(count, len(scores)))] for scores in strata]
        found.append(measure(np.moveaxis(np.concatenate(drawn, axis=1), 1, -1)))
    return np.concatenate(found)


def interval(resampled: np.ndarray, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
    """The percentile interval, along the first axis."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level!r}, expected more than 0 and less than 1")
    tail = (1 - level) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail], axis=0)
    return low, high


def caution(num_seeds: int) -> str:
    """What a reader must know about an interval from so few seeds; empty if nothing."""
    if num_seeds == 0:
        return "no seed: no number"
    if num_seeds == 1:
        return "one seed: no interval"
    if num_seeds < FEW_SEEDS:
        return f"{num_seeds} seeds: the interval is likely too narrow"
    return ""


def checked(strata: Strata) -> list[np.ndarray]:
    """The scores as arrays of floats; a `ValueError` if they are none."""
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
