"""What became of the hypotheses of a study: the tests that its page in docs/findings names.

    .venv/bin/python docs/findings/hypotheses.py clip_lag outputs/clip_lag

A claim compares two settings, seed by seed. The p-values are those of paired tests, corrected by
Holm's method for all claims of the study on a task. Below 0.05 a claim is confirmed or, if the
difference has the other sign, its opposite is shown. Otherwise the runs do not decide it.

The score of these studies is the return of the acting weights, which mixes what was learned with
the age of the weights and the randomness of the policy. So the same difference of the last policy,
in greedy evaluation, stands beside it, with a p-value corrected likewise. Claims that the runs did
not test are still counted in the correction, as fixed in advance, and have no verdict.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import pearsonr

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.report.runs import read_runs  # noqa: E402
from harness.report.scores import TRAINED, mean_return  # noqa: E402
from harness.report.statistics import (  # noqa: E402
    Estimate,
    equivalence_test,
    holm,
    paired_test,
)

LEVEL = 0.05
SCORE, LAST = "score", "last policy"
Options = Mapping[str, Any]


def typed(value: Any) -> str:
    """An option's value as it is typed."""
    return "null" if value is None else str(value)


class Side(NamedTuple):
    """A setting. With `less`, the difference of its score from that of another setting."""

    setting: Options
    less: Options | None = None

    def __str__(self) -> str:
        name = " ".join(map(typed, self.setting.values()))
        return name if self.less is None else f"the change of {name}"


@dataclass(frozen=True)
class Claim:
    """A hypothesis about two settings: left is higher, lower, the same, or at least as high."""

    number: int
    left: Side
    kind: str
    right: Side
    measure: str = SCORE

    def __str__(self) -> str:
        subject = "" if self.measure == SCORE else f" ({self.measure})"
        return f"{self.number}. {self.left} {WORDS[self.kind]} {self.right}{subject}"


WORDS = {
    "higher": "scores higher than",
    "lower": "scores lower than",
    "same": "is equivalent to",
    "at least": "scores, within the margin, at least as high as",
}


def test(kind: str, left: np.ndarray, right: np.ndarray, margin: float) -> tuple[Estimate, float]:
    """The difference, and the p-value of the claim. A small one supports it or its opposite."""
    difference, p = paired_test(left, right)
    if kind == "same":
        return difference, equivalence_test(left, right, margin)
    if kind == "at least":  # a one-sided test has half the p-value of the two-sided one
        above, p = paired_test(left + margin, right)
        return difference, p / 2 if above.value > 0 else 1 - p / 2
    return difference, p


def verdict(kind: str, difference: Estimate, p: float) -> str:
    """What a corrected p says of a claim."""
    if not p < LEVEL:
        return "not significant" if kind in ("higher", "lower") else "not shown"
    wrong = (kind == "higher" and difference.value < 0) or (
        kind == "lower" and difference.value > 0
    )
    return "the opposite" if wrong else "confirmed"


# -- the claims of each study


def objectives(tokens: bool) -> Iterator[Claim]:
    def at(objective: str, lag: int) -> Options:
        return {"algo.objective": objective, "sync.lag": lag}

    def alone(objective: str, lag: int) -> Side:
        return Side(at(objective, lag))

    def change(objective: str, lag: int) -> Side:
        return Side(at(objective, lag), less=at(objective, 0))

    for lag in (4, 16):
        yield Claim(1, change("decoupled", lag), "higher", change("behaviour", lag))
    for name in ("cispo", "truncated_is", "vtrace"):
        yield Claim(2, alone(name, 64), "lower", alone("behaviour", 64))
    for lag in (4, 16, 64):
        yield Claim(3, alone("m2po", lag), "same", alone("m2po", 0))
    for lag in (4, 16, 64):
        yield Claim(4, alone("dppo", lag), "at least", alone("behaviour", lag))
    for lag in (4, 16, 64):
        yield Claim(5, alone("vaco", lag), "higher", alone("behaviour", lag))
    if tokens:
        yield Claim(6, alone("vespo", 64), "at least", alone("vespo", 4))
        for name in ("gspo", "sapo"):
            yield Claim(6, alone(name, 64), "lower", alone(name, 4))
    for lag in (0, 4, 16, 64):
        yield Claim(7, alone("a3po", lag), "same", alone("decoupled", lag))
    for lag in (16, 64):
        yield Claim(8, change("vcpo", lag), "higher", change("truncated_is", lag))


def clip_lag() -> Iterator[Claim]:
    def at(clip: float, lag: int, objective: str = "behaviour") -> Side:
        return Side({"algo.objective": objective, "algo.clip": clip, "sync.lag": lag})

    for lag in (4, 16):
        for clip in (0.4, 0.8):
            yield Claim(1, at(clip, lag), "higher", at(0.2, lag))
    for clip in (0.4, 0.8):
        yield Claim(2, at(0.2, 0), "at least", at(clip, 0))
    for clip, lag in ((0.45, 4), (0.82, 16)):
        yield Claim(4, at(clip, lag), "at least", at(0.2, lag, "decoupled"))
    for lag in (4, 16):
        for narrow, wide in ((0.1, 0.2), (0.2, 0.4), (0.4, 0.8)):
            yield Claim(5, at(wide, lag), "lower", at(narrow, lag), "policy/ess")


def cache(zero_is_lower: bool) -> Iterator[Claim]:
    def at(state: str, workers: int) -> Side:
        return Side({"sync.state_on_update": state, "collector.num_workers": workers})

    number = 2 if zero_is_lower else 1
    for workers in (2, 5, 17):
        yield Claim(number, at("keep", workers), "same", at("recompute", workers))
    if zero_is_lower:
        yield Claim(3, at("zero", 17), "lower", at("keep", 17))
    for state in ("keep", "recompute", "zero"):
        yield Claim(4, at(state, 17), "lower", at(state, 2))


def dropping() -> Iterator[Claim]:
    free = Side({"sync.max_lag": None, "sync.on_stale": "drop"})
    drop, mask, wait = (
        Side({"sync.max_lag": 8, "sync.on_stale": name}) for name in ("drop", "mask", "wait")
    )
    for side in (drop, mask):
        yield Claim(1, side, "lower", wait, "kept length")
        yield Claim(1, side, "lower", free, "kept length")
    yield Claim(2, wait, "higher", drop)
    yield Claim(2, mask, "at least", drop)
    yield Claim(3, free, "lower", wait)


def bias_and_score(values: pd.DataFrame) -> str:
    """Over runs that drop: whether those that keep fewer long episodes score lower."""
    runs = of_setting(
        values, {"sync.max_lag": 8, "sync.on_stale": "drop"}, ["kept length", "score"]
    )
    correlation, p = pearsonr(runs["kept length"], runs["score"])
    count = f"over {len(runs)} runs that drop"
    return f"4. correlation of kept length and score {count}: {correlation:.2f} (p {p:.2g})"


class Study(NamedTuple):
    """The claims of a study on a task, the margin of equivalence, and what else is computed.

    withdrawn: why claims of these numbers say nothing about the papers that they were taken from.
    """

    claims: Callable[[], Iterator[Claim]]
    margin: float
    besides: Callable[[pd.DataFrame], str] | None = None
    withdrawn: Mapping[int, str] = {}


# The stored runs of these lack what the method of their name needs.
REFUSED_TODAY = ("vaco", "vcpo", "vespo", "vtrace")
NOT_TESTED = {
    3: "M2PO counts gradient steps",
    5: "VACO was run without V-trace",
    6: "VESPO divides a rollout batch",
    8: "VCPO is about sequences and gradient norms",
}
STUDIES = {
    "objectives_at_lag": Study(partial(objectives, tokens=False), 20, None, NOT_TESTED),
    "objectives_at_lag_tokens": Study(partial(objectives, tokens=True), 0.05, None, NOT_TESTED),
    "clip_lag": Study(clip_lag, 20),
    "cache_tokens": Study(partial(cache, zero_is_lower=False), 0.05),
    "cache_lstm": Study(partial(cache, zero_is_lower=True), 20),
    "dropping": Study(dropping, 20, bias_and_score),
}


# -- what the runs say


LENGTHS = ("episodes/length_used", "episodes/length")
EVALUATED = "summary.eval/return"
MEASURES: dict[str, Callable[[pd.DataFrame], float]] = {
    SCORE: mean_return,
    "policy/ess": lambda records: float(records["policy/ess"].mean()),
    "kept length": lambda records: float(records[LENGTHS[0]].mean() / records[LENGTHS[1]].mean()),
}


def read_values(sweep: Path, names: Sequence[str], measures: Sequence[str]) -> pd.DataFrame:
    """Of each finished run: the options of these names, its seed, and each measure."""
    runs, records = read_runs([sweep], (TRAINED, "policy/ess", *LENGTHS))
    runs = runs[runs["state"] == "done"]
    parts = dict(list(records.groupby("run")))
    columns: dict[str, Any] = {  # as objects, or None beside numbers would become NaN
        name: np.array([options[name] for options in runs["options"]], object) for name in names
    }
    columns["seed"] = [int(seed) for seed in runs["seed"]]
    for measure in measures:
        columns[measure] = (
            runs[EVALUATED].to_numpy()
            if measure == LAST
            else [MEASURES[measure](parts[run]) for run in runs.index]
        )
    return pd.DataFrame(columns)


def of_setting(values: pd.DataFrame, setting: Options, measure: Any) -> Any:
    """The measure, or the measures, of a setting by seed."""
    chosen = values
    for name, wanted in setting.items():
        chosen = chosen[np.array([equal(wanted, value) for value in chosen[name]], bool)]
    return chosen.set_index("seed")[measure]


def equal(wanted: Any, value: Any) -> bool:
    """Whether a run's option, which may be a number as text, has this value."""
    if wanted is None or isinstance(wanted, str):
        return bool(value == wanted)
    return value is not None and bool(np.isclose(float(value), wanted))


def of_side(values: pd.DataFrame, side: Side, measure: str) -> pd.Series:
    """The measure of a side by seed."""
    here: pd.Series = of_setting(values, side.setting, measure)
    return here if side.less is None else here - of_setting(values, side.less, measure)


def decide(values: pd.DataFrame, claims: Sequence[Claim], margin: float) -> pd.DataFrame:
    """A row for each claim: it, the difference with its interval, the corrected p, the verdict."""
    tested = []
    for claim in claims:
        sides = [of_side(values, side, claim.measure) for side in (claim.left, claim.right)]
        pairs = pd.concat(sides, axis=1, join="inner").dropna().to_numpy()
        if len(pairs) < 2 or len(pairs) < max(map(len, sides)):
            raise ValueError(
                f"{claim}: {len(sides[0])} and {len(sides[1])} runs, of which {len(pairs)} have "
                "the same seed and a value"
            )
        tested.append(test(claim.kind, pairs[:, 0], pairs[:, 1], margin))
    corrected = holm([p for _, p in tested])
    rows = [
        (str(claim), difference, p, verdict(claim.kind, difference, p))
        for claim, (difference, _), p in zip(claims, tested, corrected, strict=True)
    ]
    return pd.DataFrame(rows, columns=["claim", "difference", "p", "verdict"])


def outcome(row: Any, withdrawn: str | None) -> tuple[str, str, str]:
    """The difference, its corrected p and the verdict, as cells of the table."""
    value, low, high, _ = row.difference
    verdict = f"withdrawn: {withdrawn}" if withdrawn else row.verdict
    return f"{value:.3g} [{low:.3g}, {high:.3g}]", f"{row.p:.2g}", verdict


def lines(name: str, sweep: Path) -> Iterator[str]:
    study = STUDIES[name]
    claims = list(study.claims())
    names = list(dict.fromkeys(key for claim in claims for key in claim.left.setting))
    measures = list(dict.fromkeys([SCORE, LAST, *(claim.measure for claim in claims)]))
    values = read_values(sweep, names, measures)
    yield f"{len(values)} runs that are done; margin {study.margin:g}"
    yield f"| {' | '.join(names)} | seeds | {' | '.join(measures)} |"
    yield f"|{'---|' * len(names)}{'--:|' * (1 + len(measures))}"
    for _, inside in values.groupby(names, dropna=False, sort=True):
        means = " | ".join(f"{inside[measure].mean():.4g}" for measure in measures)
        setting = " | ".join(map(typed, inside[names].iloc[0]))
        yield f"| {setting} | {len(inside)} | {means} |"
    yield ""
    yield f"| claim | difference | p | | {LAST} | p | |"
    yield "|---|--:|--:|---|--:|--:|---|"
    by_score = decide(values, claims, study.margin)
    scored = [claim for claim in claims if claim.measure == SCORE]
    by_last = iter(
        decide(
            values, [replace(claim, measure=LAST) for claim in scored], study.margin
        ).itertuples()
    )
    for claim, row in zip(claims, by_score.itertuples(), strict=True):
        reason = study.withdrawn.get(claim.number)
        cells = [str(claim), *outcome(row, reason)]
        cells += outcome(next(by_last), reason) if claim.measure == SCORE else ("", "", "")
        yield f"| {' | '.join(cells)} |"
    if study.besides is not None:
        yield ""
        yield study.besides(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("sweep", type=Path, help="the directory of its sweep")
    arguments = parser.parse_args()
    try:
        print("\n".join(lines(arguments.study, arguments.sweep)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
