"""Whether one setting scores more than another: paired by seed, corrected for several tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from harness.analysis.statistics import (
    LEVEL,
    NUM_RESAMPLES,
    Estimate,
    Strata,
    checked,
    draw_counts,
    interval,
)

ROUNDING = 1e-12  # differences that agree to this share of the scores' size have no spread


@dataclass(frozen=True)
class Comparison:
    """One setting against the baseline, by the differences of the seeds that both have."""

    name: str
    baseline: str
    difference: Estimate  # mean of setting minus baseline, with Student's interval
    p: float  # of Student's paired test; NaN with too few pairs or without spread
    p_adjusted: float  # by Holm's method, for all comparisons made together

    def is_told_apart(self) -> bool:
        """Whether the data show a difference; a NaN shows none."""
        return self.p_adjusted < 1 - LEVEL

    def sentence(self) -> str:
        """The finding in words."""
        pairs, value = self.difference.num_seeds, self.difference.value
        both = f"{self.name} and {self.baseline}"
        if pairs == 0:
            return f"{both} share no seed: they cannot be compared."
        if pairs == 1:
            return f"{both} share one seed: one pair cannot tell a difference from chance."
        if value == 0 and self.difference.low == self.difference.high:
            return f"{both} scored the same in all {pairs} pairs."
        if math.isnan(self.p):
            return (
                f"{self.name} differs from {self.baseline} by {value:.4g} in each of {pairs} "
                "pairs, which leaves no spread to test it against."
            )
        low, high = self.difference.low, self.difference.high
        p = f"corrected p = {self.p_adjusted:.2g}"
        if not self.is_told_apart():
            return (
                f"The data cannot tell {both} apart ({pairs} pairs, "
                f"difference {value:+.4g}, interval {low:.4g} to {high:.4g}, {p})."
            )
        word = "higher" if value > 0 else "lower"
        return (
            f"{self.name} scores {abs(value):.4g} {word} than {self.baseline} ({pairs} pairs, "
            f"interval {low:+.4g} to {high:+.4g}, {p})."
        )


def compare_pairs(
    scores: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]]
) -> list[Comparison]:
    """The first of each pair against the second (name → seed → score), as one family of tests."""
    found = [paired_test(*pair_by_seed(scores[a], scores[b])) for a, b in pairs]
    adjusted = holm([p for _, p in found])
    return [
        Comparison(*pair, difference, p, p_adjusted)
        for pair, (difference, p), p_adjusted in zip(pairs, found, adjusted, strict=True)
    ]


def pair_by_seed(
    left: Mapping[int, float], right: Mapping[int, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The scores of both at the seeds that both have, in the order of the seeds."""
    shared = sorted(left.keys() & right.keys())
    return (
        np.array([left[seed] for seed in shared], dtype=np.float64),
        np.array([right[seed] for seed in shared], dtype=np.float64),
    )


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
    test = stats.ttest_rel(left, right)
    inside = test.confidence_interval(LEVEL)
    return Estimate(value, float(inside.low), float(inside.high), pairs), float(test.pvalue)


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


def probability_of_improvement(left: Strata, right: Strata) -> Estimate:
    """The probability that a run of `left` scores more than one of `right`, a tie counting half.

    The mean over tasks; 0.5 means no difference. Both sides are resampled within tasks.
    """
    left, right = checked(left), checked(right)
    if len(left) != len(right):
        raise ValueError(f"left has {len(left)} tasks and right {len(right)}, expected as many")
    wins = [
        (a[:, None] > b) + 0.5 * (a[:, None] == b)  # [runs of left, runs of right]
        for a, b in zip(left, right, strict=True)
    ]
    value = float(np.mean([won.mean() for won in wins]))
    fewest = min(len(scores) for scores in [*left, *right])
    if fewest < 2:
        return Estimate(value, math.nan, math.nan, fewest)
    rng = np.random.default_rng(0)
    found = []
    for won in wins:
        rows, columns = (draw_counts(n, NUM_RESAMPLES, rng) for n in won.shape)
        found.append(((rows @ won) * columns).sum(axis=1) / won.size)
    low, high = interval(np.mean(found, axis=0))
    return Estimate(value, float(low), float(high), fewest)
