"""Whether settings differ, or are equivalent: paired by seed, corrected for several tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from harness.errors import suggest
from harness.numbers import count
from harness.report.settings import by_size
from harness.report.statistics import (
    LEVEL,
    equivalence_test,
    holm,
    paired_test,
    student_quantile,
)
from harness.report.text import number, with_interval

HIGHER, LOWER, EQUIVALENT, UNDECIDED = "higher", "lower", "equivalent", "no difference found"
IDENTICAL = "identical"  # the same score in every pair
UNTESTED = "not tested"  # fewer than two pairs, or a difference without any spread
WITHIN = " by less than the margin"  # a difference that is shown, and shown to be small
VERDICTS = (
    LOWER,
    f"{LOWER}{WITHIN}",
    EQUIVALENT,
    IDENTICAL,
    f"{HIGHER}{WITHIN}",
    HIGHER,
    UNDECIDED,
    UNTESTED,
)
PHRASES = {  # of the verdicts that name no direction
    EQUIVALENT: "{} and {} are equivalent",
    IDENTICAL: "{} and {} are identical",
    UNDECIDED: "no difference found between {} and {}",
    UNTESTED: "{} and {} are not tested",
}
POWER = 0.8  # with which a difference of the margin's size is to be found
MOST_PAIRS = 1000

# A comparison is a row of this table: the difference is the setting's score less the baseline's.
COMPARISONS = [
    "setting",
    "baseline",
    "pairs",
    "difference",
    "low",
    "high",
    "p",
    "p_corrected",
    "margin",
    "p_equivalent",
    "p_equivalent_corrected",
    "verdict",
]
# An interaction is a row of this one: the effect of one option at a value of another, against its
# effect at the first value.
INTERACTIONS = [
    "change",
    "at",
    "base",
    "rest",
    "seeds",
    "effect",
    "base_effect",
    "difference",
    "low",
    "high",
    "p",
    "p_corrected",
    "margin",
    "seeds_needed",
]


@dataclass(frozen=True)
class Margin:
    """The difference below which two settings count as equivalent."""

    share: float = 0.1  # of the baseline's mean, where no score is below zero
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


# -- comparisons


def compare_pairs(
    scores: pd.DataFrame, pairs: Sequence[tuple[str, str]], margin: Margin = DEFAULT_MARGIN
) -> pd.DataFrame:
    """The first of each pair against the second, as one family of tests: `COMPARISONS`.

    scores: a row for each setting, a column for each seed, NaN where there is no score.
    """
    share = has_share(scores)
    table = pd.DataFrame(
        [_compare(name, baseline, scores, margin, share) for name, baseline in pairs],
        columns=COMPARISONS,
    )
    for p in ("p", "p_equivalent"):
        table[f"{p}_corrected"] = holm(table[p].to_numpy(float))
    table["verdict"] = [_verdict(row) for row in table.itertuples()]
    return table


def has_share(scores: pd.DataFrame) -> bool:
    """Whether a share of a score means something: not where scores lie below zero."""
    return not (scores.to_numpy(float) < 0).any()


def _compare(
    name: str, baseline: str, scores: pd.DataFrame, margin: Margin, share: bool
) -> dict[str, Any]:
    rows = scores.loc[[name, baseline]].to_numpy(float)
    left, right = rows[:, np.isfinite(rows).all(axis=0)]  # the seeds that both have
    difference, p = paired_test(left, right)
    least = margin.of(right) if share or margin.points is not None else math.nan
    return {
        "setting": name,
        "baseline": baseline,
        "pairs": difference.seeds,
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "p": p,
        "margin": least,
        "p_equivalent": equivalence_test(left, right, least),
    }


def is_significant(comparison: Any) -> bool:
    """Whether the data show a difference; a NaN shows none."""
    return bool(comparison.p_corrected < 1 - LEVEL)


def _verdict(comparison: Any) -> str:
    """One of `VERDICTS`."""
    if comparison.low == comparison.high == comparison.difference == 0:
        return IDENTICAL
    if math.isnan(comparison.p):
        return UNTESTED
    is_equivalent = comparison.p_equivalent_corrected < 1 - LEVEL
    if is_significant(comparison):
        word = HIGHER if comparison.difference > 0 else LOWER
        return f"{word}{WITHIN}" if is_equivalent else word
    return EQUIVALENT if is_equivalent else UNDECIDED


def in_words(comparison: Any) -> str:
    """The verdict on one comparison, and its numbers."""
    verdict, both = comparison.verdict, (comparison.setting, comparison.baseline)
    p = comparison.p_corrected
    if verdict == EQUIVALENT:
        p = comparison.p_equivalent_corrected
    if verdict in PHRASES:
        text = PHRASES[verdict].format(*both)
    else:
        text = f"{both[0]} is {verdict.removesuffix(WITHIN)} than {both[1]}"
        text += WITHIN if verdict.endswith(WITHIN) else ""
    difference = with_interval(comparison.difference, comparison.low, comparison.high)
    pairs = count(comparison.pairs, "pair")
    return f"{text} (difference {difference}, {pairs}, corrected p = {number(p, 2)})."


def pairs_needed(comparison: Any, pairs: int, num_tests: int) -> int | None:
    """How many pairs would show a difference of the margin's size.

    With `POWER`, at the variance of the `pairs` that there are, as one of `num_tests` that are
    corrected together (by the most that Holm's method may ask for). None if the variance is not
    known, or if it takes more than `MOST_PAIRS`.
    """
    width = comparison.high - comparison.low
    if pairs < 2 or not comparison.margin > 0 or width == 0:
        return None
    deviation = width / 2 * math.sqrt(pairs) / student_quantile((1 + LEVEL) / 2, pairs - 1)
    counts = np.arange(2, MOST_PAIRS + 1)
    critical = special.stdtrit(counts - 1, 1 - (1 - LEVEL) / num_tests / 2)
    shift = comparison.margin * np.sqrt(counts) / deviation
    enough = counts[1 - special.nctdtr(counts - 1, shift, critical) >= POWER]
    return int(enough[0]) if len(enough) else None


# -- interactions


def interactions(
    settings: pd.DataFrame,
    names: Sequence[str],
    scores: pd.DataFrame,
    named: str,
    margin: Margin = DEFAULT_MARGIN,
) -> pd.DataFrame:
    """Those of the two options that `a*b` names, for each of their later values: `INTERACTIONS`.

    Settings that differ in others of the options `names` are kept apart.
    """
    first, second = _two_options(named, names)
    share = has_share(scores)
    groups: dict[str, dict[tuple[str, str], pd.Series]] = {}
    for label, setting in settings.iterrows():
        rest = " · ".join(f"{key}={setting[key]}" for key in names if key not in (first, second))
        groups.setdefault(rest, {})[setting[first], setting[second]] = scores.loc[label]
    rows = []
    for rest, cells in groups.items():
        (start, *values), (base, *others) = (
            sorted({place[i] for place in cells}, key=by_size) for i in (0, 1)
        )
        for at in others:
            for value in values:
                corners = [(value, at), (start, at), (value, base), (start, base)]
                if not all(corner in cells for corner in corners):
                    continue
                shared = pd.DataFrame([cells[corner] for corner in corners]).dropna(axis=1)
                columns = shared.to_numpy(float)
                effects = columns[0] - columns[1], columns[2] - columns[3]
                difference, p = paired_test(*effects)
                row: dict[str, Any] = {"change": f"{first} from {start} to {value}", "rest": rest}
                row |= {"at": f"{second}={at}", "base": f"{second}={base}", "p": p}
                for column, effect in zip(("effect", "base_effect"), effects, strict=True):
                    row[column] = float(effect.mean()) if len(effect) else math.nan
                row |= {"difference": difference.value, "low": difference.low}
                has_margin = share or margin.points is not None
                row["margin"] = margin.of(columns[3]) if has_margin else math.nan
                rows.append({**row, "high": difference.high, "seeds": difference.seeds})
    table = pd.DataFrame(rows, columns=INTERACTIONS)
    table["p_corrected"] = holm(table["p"].to_numpy(float))
    needed = [pairs_needed(row, row.seeds, len(table)) for row in table.itertuples()]
    table["seeds_needed"] = np.array(needed, float)
    return table


def _two_options(named: str, options: Sequence[str]) -> tuple[str, str]:
    """The full names of both options."""
    parts = [part.strip() for part in named.split("*")]
    if len(parts) != 2:
        raise ValueError(f"--interaction is {named!r}, expected two options: sync.lag*algo.clip")
    keys = []
    for part in parts:
        matches = [key for key in options if part in (key, key.rsplit(".", 1)[-1])]
        if len(matches) != 1:
            raise ValueError(f"--interaction names {part!r}; {suggest(part, options)}")
        keys += matches
    if keys[0] == keys[1]:
        raise ValueError(f"--interaction is {named!r}, expected two different options")
    return keys[0], keys[1]
