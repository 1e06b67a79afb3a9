"""Whether two settings differ, or are equivalent: paired by seed, corrected for several tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from harness.report.statistics import (
    LEVEL,
    NUM_RESAMPLES,
    Estimate,
    Strata,
    checked,
    draw_counts,
    interval,
)
from harness.report.text import number, signed

ROUNDING = 1e-12  # differences that agree to this share of the scores' size have no spread
HIGHER, LOWER, EQUIVALENT, UNDECIDED = "higher", "lower", "equivalent", "cannot be told"
IDENTICAL = "identical"  # the same score in every pair
WITHIN = " by less than the margin"  # a difference that is shown, and shown to be small
VERDICTS = (
    *(LOWER, f"{LOWER}{WITHIN}", EQUIVALENT, IDENTICAL, f"{HIGHER}{WITHIN}", HIGHER, UNDECIDED),
)
POWER = 0.8  # with which a difference of the margin's size is to be found
MOST_PAIRS = 1000


@dataclass(frozen=True)
class Margin:
    """The difference below which two settings count as equivalent."""

    share: float = 0.1  # of the baseline's mean
    points: float | None = None  # of the score, instead of a share

    def of(self, baseline: np.ndarray) -> float:
        """In points of the score."""
        if self.points is not None:
            return self.points
        return self.share * abs(float(baseline.mean())) if len(baseline) else math.nan

    def __str__(self) -> str:
        if self.points is not None:
            return f"{self.points:g}"
        return f"{100 * self.share:g} % of the baseline's mean"


DEFAULT_MARGIN = Margin()


@dataclass(frozen=True)
class Comparison:
    """One setting against the baseline, by the differences of the seeds that both have."""

    name: str
    baseline: str
    difference: Estimate  # mean of setting minus baseline, with Student's interval
    p: float  # of Student's paired test; NaN with too few pairs or without spread
    p_adjusted: float  # by Holm's method, for all comparisons made together
    margin: float = math.nan  # differences below it count as none
    p_equivalent: float = math.nan  # of two one-sided tests against the margin
    p_equivalent_adjusted: float = math.nan  # by Holm's method, too

    def is_told_apart(self) -> bool:
        """Whether the data show a difference; a NaN shows none."""
        return self.p_adjusted < 1 - LEVEL

    def is_equivalent(self) -> bool:
        """Whether the data show that the difference is smaller than the margin."""
        return self.p_equivalent_adjusted < 1 - LEVEL

    def is_identical(self) -> bool:
        """Whether both scored the same in each of several pairs."""
        return self.difference.low == self.difference.high == self.difference.value == 0

    def pairs_needed(self, num_tests: int) -> int | None:
        """How many pairs would tell a difference of the margin's size from chance.

        With `POWER`, at the variance of these pairs, as one of `num_tests` that are corrected
        together (by the most that Holm's method may ask for). None if the variance is not known, or
        if it takes more than `MOST_PAIRS`.
        """
        pairs = self.difference.num_seeds
        if pairs < 2 or not self.margin > 0 or self.difference.low == self.difference.high:
            return None
        half = (self.difference.high - self.difference.low) / 2
        deviation = half * math.sqrt(pairs) / stats.t.ppf((1 + LEVEL) / 2, pairs - 1)
        counts = np.arange(2, MOST_PAIRS + 1)
        critical = stats.t.ppf(1 - (1 - LEVEL) / num_tests / 2, counts - 1)
        shift = self.margin * np.sqrt(counts) / deviation
        enough = counts[stats.nct.sf(critical, counts - 1, shift) >= POWER]
        return int(enough[0]) if len(enough) else None

    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.is_identical():
            return IDENTICAL
        if self.is_told_apart():
            word = HIGHER if self.difference.value > 0 else LOWER
            return f"{word}{WITHIN}" if self.is_equivalent() else word
        return EQUIVALENT if self.is_equivalent() else UNDECIDED

    def sentence(self) -> str:
        """The finding in words."""
        pairs, value = self.difference.num_seeds, self.difference.value
        both = f"{self.name} and {self.baseline}"
        if pairs == 0:
            return f"{both} share no seed: they cannot be compared."
        if pairs == 1:
            return f"{both} share one seed: one pair cannot tell a difference from chance."
        if self.is_identical():
            return f"{both} are identical: they scored the same in all {pairs} pairs."
        if math.isnan(self.p):
            return (
                f"{self.name} differs from {self.baseline} by {number(value)} in each of {pairs} "
                "pairs, which leaves no spread to test it against."
            )
        low, high = self.difference.low, self.difference.high
        p = f"corrected p = {self.p_adjusted:.2g}"
        if self.verdict() == EQUIVALENT:
            return (
                f"{both} are equivalent: they differ by less than {number(self.margin)} ({pairs} "
                f"pairs, difference {signed(value)}, interval {number(low)} to {number(high)}, "
                f"corrected p of equivalence = {self.p_equivalent_adjusted:.2g})."
            )
        if not self.is_told_apart():
            return (
                f"The data cannot tell {both} apart ({pairs} pairs, "
                f"difference {signed(value)}, interval {number(low)} to {number(high)}, {p})."
            )
        word = "higher" if value > 0 else "lower"
        return (
            f"{self.name} scores {number(abs(value))} {word} than {self.baseline} ({pairs} pairs, "
            f"interval {signed(low)} to {signed(high)}, {p})."
        )


def compare_pairs(
    scores: Mapping[str, Mapping[int, float]],
    pairs: Sequence[tuple[str, str]],
    margin: Margin = DEFAULT_MARGIN,
) -> list[Comparison]:
    """The first of each pair against the second (name → seed → score), as one family of tests."""
    paired = [pair_by_seed(scores[a], scores[b]) for a, b in pairs]
    tests = [paired_test(left, right) for left, right in paired]
    margins = [margin.of(right) for _, right in paired]
    equivalent = [
        equivalence_test(left, right, least)
        for (left, right), least in zip(paired, margins, strict=True)
    ]
    adjusted, equivalent_adjusted = holm([p for _, p in tests]), holm(equivalent)
    return [
        Comparison(
            *(name, baseline, *tests[place], adjusted[place]),
            *(margins[place], equivalent[place], equivalent_adjusted[place]),
        )
        for place, (name, baseline) in enumerate(pairs)
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


def equivalence_test(left: np.ndarray, right: np.ndarray, margin: float) -> float:
    """The p of two one-sided paired t-tests that the mean difference lies within the margin."""
    differences = left - right
    if len(differences) < 2 or not margin > 0:
        return math.nan
    rounding = ROUNDING * float(np.abs([left, right]).max())
    if differences.std(ddof=1) <= rounding:
        return 0.0 if abs(float(differences.mean())) <= rounding else math.nan
    above = stats.ttest_1samp(differences, -margin, alternative="greater")
    below = stats.ttest_1samp(differences, margin, alternative="less")
    return float(max(above.pvalue, below.pvalue))


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
    drawn = draw_counts(tuple(n for won in wins for n in won.shape), NUM_RESAMPLES)
    shares = [
        ((rows @ won) * columns).sum(axis=1) / won.size
        for won, rows, columns in zip(wins, drawn[::2], drawn[1::2], strict=True)
    ]
    low, high = interval(np.mean(shares, axis=0))
    return Estimate(value, float(low), float(high), fewest)
