"""Is one strategy better than another? Paired by seed, corrected for how often one asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.statistics import student
from harness.analysis.statistics.estimates import (
    LEVEL,
    NUM_RESAMPLES,
    Estimate,
    Strata,
    checked,
    interval,
)

# Differences that agree to this share of the scores' size are rounding and not chance.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Comparison:
    """One strategy against the baseline, by the differences of the seeds both have."""

    name: str
    baseline: str
    difference: Estimate  # mean of strategy minus baseline; Student's interval
    p: float  # of Student's paired test; NaN where pairs are too few or tell nothing
    p_adjusted: float  # by Holm, for all comparisons made together

    def is_told_apart(self, level: float = LEVEL) -> bool:
        """Whether the data show a difference; NaN shows none."""
        return self.p_adjusted < 1 - level

    def sentence(self) -> str:
        """The finding in words."""
        pairs, value = self.difference.num_seeds, self.difference.value
        if pairs == 0:
            return f"{self.name} and {self.baseline} share no seed: they cannot be compared."
        if pairs == 1:
            return (
                f"{self.name} and {self.baseline} share one seed: "
                f"one pair cannot tell a difference from chance."
            )
        if value == 0 and self.difference.low == self.difference.high:
            return f"{self.name} and {self.baseline} scored the same in all {pairs} pairs."
        if math.isnan(self.p):
            return (
                f"{self.name} differs from {self.baseline} by {value:.4g} in each of {pairs} "
                "pairs, which leaves no spread to test it against."
            )
        if not self.is_told_apart():
            return (
                f"The data cannot tell {self.name} and {self.baseline} apart ({pairs} pairs, "
                f"difference {value:+.4g}, interval {self.difference.low:.4g} to "
                f"{self.difference.high:.4g}, corrected p = {self.p_adjusted:.2g})."
            )
        word = "higher" if value > 0 else "lower"
        return (
            f"{self.name} scores {abs(value):.4g} {word} than {self.baseline} ({pairs} pairs, "
            f"interval {self.difference.low:+.4g} to {self.difference.high:+.4g}, corrected "
            f"p = {self.p_adjusted:.2g})."
        )


def pair_by_seed(
    left: Mapping[int, float], right: Mapping[int, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The scores of both at the seeds that both have, in the order of the seeds."""
    shared = sorted(left.keys() & right.keys())
    return (
        np.array([left[seed] for seed in shared], dtype=np.float64),
        np.array([right[seed] for seed in shared], dtype=np.float64),
    )


def compare_paired(
    scores: Mapping[str, Mapping[int, float]], baseline: str, *, level: float = LEVEL
) -> list[Comparison]:
    """Every other strategy (name → seed → score) against `baseline`, as one family of tests."""
    if baseline not in scores:
        raise ValueError(f"baseline is {baseline!r}, expected one of {', '.join(scores)}")
    return compare_pairs(scores, [(x, baseline) for x in scores if x != baseline], level=level)


def compare_pairs(
    scores: Mapping[str, Mapping[int, float]],
    pairs: Sequence[tuple[str, str]],
    *,
    level: float = LEVEL,
) -> list[Comparison]:
    """The first of each pair against the second, as one family of tests."""
    found = [paired_test(*pair_by_seed(scores[a], scores[b]), level) for a, b in pairs]
    adjusted = holm([p for _, p in found])
    return [
        Comparison(name, baseline, difference, p, p_adjusted)
        for (name, baseline), (difference, p), p_adjusted in zip(
            pairs, found, adjusted, strict=True
        )
    ]


def paired_test(
    left: np.ndarray, right: np.ndarray, level: float = LEVEL
) -> tuple[Estimate, float]:
    """Mean difference with Student's interval, and the p of Student's paired test.

    Not a bootstrap: with the few pairs that there are, its intervals are too narrow to decide by.
    """
    differences = left - right
    pairs = len(differences)
    if pairs == 0:
        return Estimate(math.nan, math.nan, math.nan, 0), math.nan
    value = float(differences.mean())
    if pairs == 1:
        return Estimate(value, math.nan, math.nan, 1), math.nan
    spread = float(differences.std(ddof=1))
    rounding = ROUNDING * float(np.abs([left, right]).max())
    if spread <= rounding:
        value = value if abs(value) > rounding else 0.0
        return Estimate(value, value, value, pairs), math.nan if value else 1.0
    error = spread / math.sqrt(pairs)
    reach = student.quantile(level, pairs - 1) * error
    p = student.two_sided_p(value / error, pairs - 1)
    return Estimate(value, value - reach, value + reach, pairs), p


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: the smallest of m is multiplied by m, the next by m - 1, and so on.

    What claims a difference after it is wrong in at most one family of twenty (level 0.95). NaN is
    no test: it stays, and does not count.
    """
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(len(p), np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    return [float(value) for value in adjusted]


def probability_of_improvement(
    left: Strata,
    right: Strata,
    *,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    rng_seed: int = 0,
) -> Estimate:
    """How likely a run of `left` scores more than one of `right`; a tie is half. Mean over tasks.

    0.5 means no difference. The runs of both are resampled within tasks, each on its own.
    """
    left, right = checked(left), checked(right)
    if len(left) != len(right):
        raise ValueError(f"left has {len(left)} tasks and right {len(right)}, expected as many")
    wins = [_wins(a, b) for a, b in zip(left, right, strict=True)]
    value = float(np.mean([won.mean() for won in wins]))
    fewest = min(len(scores) for scores in [*left, *right])
    if fewest < 2:
        return Estimate(value, math.nan, math.nan, fewest)
    rng = np.random.default_rng(rng_seed)
    found = np.mean([_resampled_wins(won, num_resamples, rng) for won in wins], axis=0)
    low, high = interval(found, level)
    return Estimate(value, float(low), float(high), fewest)


def _wins(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """1 where the row's score is above the column's, half where they tie."""
    return (left[:, None] > right) + 0.5 * (left[:, None] == right)


def _resampled_wins(wins: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The mean win of each resample: how often rows and columns were drawn weighs the table."""
    rows, columns = (rng.multinomial(n, np.full(n, 1 / n), size=count) for n in wins.shape)
    return ((rows @ wins) * columns).sum(axis=1) / wins.size
