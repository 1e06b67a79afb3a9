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
from harness.report.settings import by_size
from harness.report.statistics import (
    LEVEL,
    equivalence_test,
    holm,
    paired_test,
    student_quantile,
)
from harness.report.text import joined, number, signed

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
    "finding",
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
    "finding",
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
    table["finding"] = [_sentence(row) for row in table.itertuples()]
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


def _sentence(comparison: Any) -> str:
    """The finding in words."""
    name, baseline = comparison.setting, comparison.baseline
    pairs, value = comparison.pairs, comparison.difference
    both = f"{name} and {baseline}"
    if pairs == 0:
        return f"{both} share no seed: they cannot be compared."
    if pairs == 1:
        return f"{both} share one seed: one pair cannot show a difference."
    if comparison.verdict == IDENTICAL:
        return f"{both} are identical: they scored the same in all {pairs} pairs."
    if math.isnan(comparison.p):
        return (
            f"{name} differs from {baseline} by {number(value)} in each of {pairs} pairs, which "
            "leaves no spread to test it against."
        )
    low, high = comparison.low, comparison.high
    p = f"corrected p = {comparison.p_corrected:.2g}"
    if comparison.verdict == EQUIVALENT:
        return (
            f"{both} are equivalent: they differ by less than {number(comparison.margin)} ({pairs} "
            f"pairs, difference {signed(value)}, interval {number(low)} to {number(high)}, "
            f"corrected p of equivalence = {comparison.p_equivalent_corrected:.2g})."
        )
    if not is_significant(comparison):
        return (
            f"No difference found between {both} ({pairs} pairs, difference {signed(value)}, "
            f"interval {number(low)} to {number(high)}, {p})."
        )
    word = "higher" if value > 0 else "lower"
    return (
        f"{name} scores {number(abs(value))} {word} than {baseline} ({pairs} pairs, interval "
        f"{signed(low)} to {signed(high)}, {p})."
    )


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
    table["finding"] = [_sentence_of_interaction(row, len(table)) for row in table.itertuples()]
    return table


def effects(rows: Sequence[Any], what: str = "the score") -> str:
    """What one change does at each value of the other option, and where it does more.

    rows: interactions with one change, against one value of the other option.
    """
    first = rows[0]
    values = [first.base_effect, *(row.effect for row in rows)]
    settings = [first.base, *(row.at for row in rows)]
    verb, sizes, more, less = "changes", list(map(signed, values)), "higher", "lower"
    if max(values) < 0:
        verb, sizes, more, less = "lowers", [number(-value) for value in values], "less", "more"
    elif min(values) > 0:
        verb, sizes, more, less = "raises", list(map(number, values)), "more", "less"
    where = f" ({first.rest})" if first.rest else ""
    text = f"Changing {first.change}{where} {verb} {what} " + joined(
        f"by {size} with {setting}" for size, setting in zip(sizes, settings, strict=True)
    )
    findings = []
    for word, is_up in ((more, True), (less, False)):
        settings = [
            f"{row.at} (p = {number(row.p_corrected, 2)})"
            for row in rows
            if is_significant(row) and (row.difference > 0) == is_up
        ]
        if settings:
            findings.append(f"{word} with {joined(settings)} than with {first.base}")
    for row in rows:
        if not math.isfinite(row.p_corrected):
            findings.append(f"too few shared seeds to compare {row.at} with {first.base}")
        elif not is_significant(row):
            p = number(row.p_corrected, 2)
            findings.append(f"no difference found between {row.at} and {first.base} (p = {p})")
    return f"{text}: {'; '.join(findings)}."


def _sentence_of_interaction(row: Any, num_tests: int) -> str:
    finding = effects([row])
    if not math.isfinite(row.p_corrected):
        return finding
    finding += (
        f" The effects differ by {signed(row.difference)} "
        f"[{number(row.low)}, {number(row.high)}] in {row.seeds} seeds."
    )
    needed = pairs_needed(row, row.seeds, num_tests)
    if is_significant(row) or needed is None:
        return finding
    return f"{finding} To show a difference of {number(row.margin)}, you need about {needed} seeds."


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
