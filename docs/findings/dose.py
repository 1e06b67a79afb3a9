"""What old weights cost in learning, in randomness and by delay: `experiment=dose`, `dose_tokens`.

    .venv/bin/python docs/findings/dose.py outputs/dose [--seeds 4-10] [--figure dose.png]

acting    return of the weights that act in training, old and sampling their actions: the mean over
          training, and around the evaluations (within half of the gap between two)
sampled   return of the newest weights with sampled actions, mean of the evaluations
newest    the same with the most likely actions
last      the same, of the last evaluation alone

Between two settings, the difference in acting (around the evaluations) is the sum of three:
learning, the difference in newest; randomness, that in sampled - newest; and delay, that in
acting - sampled. Brackets hold Student's 95 % interval over seeds. The p-values are those of paired
t-tests, corrected by Holm's method for the hypotheses of the study.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.report.drawing import Key, draw, line_look, panels  # noqa: E402
from harness.report.figures import positions  # noqa: E402
from harness.report.runs import read_runs  # noqa: E402
from harness.report.scores import EVALUATED, SAMPLED, TRAINED, mean_return  # noqa: E402
from harness.report.statistics import Estimate, holm, paired_test, student  # noqa: E402

ENTROPY, STEPS = "eval/entropy", "train/gradient_steps"
SCORES = ("acting", "around", "sampled", "newest", "last", "entropy")
Setting = tuple[str, int]  # objective and lag


class Scores(NamedTuple):
    """The scores of a study's finished runs by setting and seed, and what else is known."""

    table: pd.DataFrame  # index (objective, lag, seed), columns SCORES
    steps: str  # gradient steps of an update
    costs: pd.Series  # time of evaluations as a share of the whole, of each run
    missing: list[str]  # runs that are not finished

    def of(self, setting: Setting, score: str) -> pd.Series:
        """A score of a setting by seed; empty if it has no run."""
        if setting not in self.table.index.droplevel("seed"):
            return pd.Series(dtype=float)
        return self.table.loc[setting][score]

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys((name, lag) for name, lag, _ in self.table.index))


def read_scores(sweep: Path, seeds: range | None = None) -> Scores:
    """The scores of all finished runs of a sweep, or of those that have the seeds."""
    runs, records = read_runs([sweep], (EVALUATED, SAMPLED, ENTROPY, TRAINED, STEPS))
    if seeds is not None:
        runs = runs[[int(options["seed"]) in seeds for options in runs["options"]]]
    done = runs[runs["state"] == "done"]
    of_run = dict(iter(records.groupby("run")))
    rows = {}
    for run, options in done["options"].items():
        place = (options["algo.objective"], int(options["sync.lag"]), int(options["seed"]))
        rows[place] = scores_of(of_run[run])
    if not rows:
        raise ValueError(f"{sweep}: no run is done")
    index = pd.MultiIndex.from_tuples(rows, names=["objective", "lag", "seed"])
    table = pd.DataFrame(list(rows.values()), index).sort_index()
    steps = sorted({round(of_run[run][STEPS].mean()) for run in done.index})
    span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    spent = done["summary.time/evaluate_s"]
    costs = spent / (spent + done["summary.wall_s"])
    return Scores(table, span, costs, list(runs.loc[runs["state"] != "done", "name"]))


def scores_of(records: pd.DataFrame) -> dict[str, float]:
    """Each score of one run."""
    evaluated = records.dropna(subset=[EVALUATED])
    return {
        "acting": mean_return(records),
        "around": around(records, evaluated["step"].to_numpy()),
        "sampled": float(evaluated[SAMPLED].mean()),
        "newest": float(evaluated[EVALUATED].mean()),
        "last": float(evaluated[EVALUATED].iloc[-1]),
        "entropy": float(evaluated[ENTROPY].mean()),
    }


def around(records: pd.DataFrame, evaluations: np.ndarray) -> float:
    """The mean over evaluations of the acting weights' return within half a gap of each.

    An `episode/return` counts for the frames since the one before it.
    """
    total = float(records["step"].max())
    ends, values = records[["step", TRAINED]].dropna().to_numpy().T
    edges = np.array([0.0, *ends[:-1], total])
    half = total / len(evaluations) / 2
    means = [
        np.average(values, weights=np.diff(np.clip(edges, at - half, min(total, at + half))))
        for at in evaluations
    ]
    return float(np.mean(means))


# -- differences and their parts


def pairs_of(scores: Scores) -> Iterator[tuple[Setting, Setting]]:
    """Each setting with `behaviour` without lag, and other objectives with it at the same lag."""
    for setting in scores.settings:
        for other in dict.fromkeys([("behaviour", 0), ("behaviour", setting[1])]):
            if other != setting and other in scores.settings:
                yield setting, other


def difference(scores: Scores, left: Setting, right: Setting, score: str) -> np.ndarray:
    """By seed, of the seeds that both have."""
    both = pd.concat([scores.of(left, score), scores.of(right, score)], axis=1, join="inner")
    return (both.iloc[:, 0] - both.iloc[:, 1]).to_numpy()


def parts(scores: Scores, left: Setting, right: Setting) -> dict[str, np.ndarray]:
    """The difference in acting and what it is made of, by seed."""
    acting, sampled, newest = (
        difference(scores, left, right, score) for score in ("around", "sampled", "newest")
    )
    return {
        "acting": acting,
        "learning": newest,
        "randomness": sampled - newest,
        "delay": acting - sampled,
    }


# -- hypotheses


class Claim(NamedTuple):
    """The left side is higher than the right one; both are computed by seed."""

    text: str
    left: Callable[[Scores], pd.Series]
    right: Callable[[Scores], pd.Series]


def higher(score: str, left: Setting, right: Setting, number: int) -> Claim:
    text = f"{number}. {named(left)} is higher in {score} than {named(right)}"
    return Claim(text, lambda s: s.of(left, score), lambda s: s.of(right, score))


def of_tokens() -> list[Claim]:
    fresh, old, decoupled = ("behaviour", 0), ("behaviour", 16), ("decoupled", 16)

    def loss(score: str) -> Callable[[Scores], pd.Series]:
        return lambda s: s.of(fresh, score) - s.of(old, score)

    def gain(score: str) -> Callable[[Scores], pd.Series]:
        return lambda s: s.of(decoupled, score) - s.of(old, score)

    return [
        Claim(
            "1. half of what behaviour loses in acting at lag 16 is more than it loses in newest",
            lambda s: loss("around")(s) / 2,
            loss("newest"),
        ),
        Claim(
            "2. decoupled gains more on behaviour in acting at lag 16 than in newest",
            gain("around"),
            gain("newest"),
        ),
        higher("entropy", old, fresh, 3),
        higher("entropy", old, decoupled, 3),
    ]


def of_lunarlander() -> list[Claim]:
    fresh = ("behaviour", 0)
    return [
        *(higher("newest", fresh, ("behaviour", lag), 1) for lag in (4, 16)),
        *(higher("newest", ("decoupled", lag), ("behaviour", lag), 2) for lag in (4, 16)),
        higher("newest", ("behaviour", 16), ("proximal", 16), 3),
        higher("entropy", ("behaviour", 16), fresh, 4),
    ]


STUDIES = {"dose_tokens": of_tokens, "dose": of_lunarlander}


def decided(scores: Scores, claims: list[Claim]) -> Iterator[tuple[str, Estimate, float, str]]:
    """Each claim with its difference, the corrected p and what that says."""
    tests = []
    for claim in claims:
        sides = pd.concat([claim.left(scores), claim.right(scores)], axis=1, join="inner").dropna()
        tests.append(paired_test(*sides.to_numpy().T))
    for claim, (found, _), p in zip(claims, tests, holm([p for _, p in tests]), strict=True):
        verdict = "not significant"
        if p < 0.05:
            verdict = "confirmed" if found.value > 0 else "the opposite"
        yield claim.text, found, p, verdict


# -- what is printed and drawn


def named(setting: Setting) -> str:
    return f"`{setting[0]}` at lag {setting[1]}"


def lines(scores: Scores, claims: list[Claim]) -> Iterator[str]:
    low, median, high = scores.costs.quantile([0, 0.5, 1])
    digits = 0 if scores.table["newest"].abs().max() > 10 else 3
    yield f"{len(scores.table)} runs; an update is {scores.steps} gradient steps"
    yield f"evaluations take {median:.0%} of a run's time (median; {low:.0%} to {high:.0%})"
    if scores.missing:
        yield f"Not finished: {', '.join(scores.missing)}."
    head = ("acting, over training", "acting, around the evaluations")
    head += ("newest, sampled", "newest", "last", "entropy")
    yield ""
    yield f"| objective | lag | seeds | {' | '.join(head)} |"
    yield f"|---|--:|--:|{'--:|' * len(SCORES)}"
    for setting in scores.settings:
        columns = [scores.of(setting, score).to_numpy() for score in SCORES]
        places = [3 if score == "entropy" else digits for score in SCORES]
        cells = " | ".join(text(student(x), at) for x, at in zip(columns, places, strict=True))
        yield f"| `{setting[0]}` | {setting[1]} | {len(columns[0])} | {cells} |"
    yield ""
    yield "| difference | in acting | delay | randomness | learning |"
    yield "|---|--:|--:|--:|--:|"
    for left, right in pairs_of(scores):
        by_part = {name: student(values) for name, values in parts(scores, left, right).items()}
        whole = by_part.pop("acting")
        cells = " | ".join(
            f"{text(by_part[name], digits)}, {by_part[name].value / whole.value:.0%}"
            for name in ("delay", "randomness", "learning")
        )
        yield f"| {named(left)} less {named(right)} | {text(whole, digits)} | {cells} |"
    yield ""
    yield "| hypothesis | difference | p | |"
    yield "|---|--:|--:|---|"
    for claim, found, p, verdict in decided(scores, claims):
        shown = text(found, 3 if "entropy" in claim else digits)
        yield f"| {claim} | {shown} | {p:.2g} | {verdict} |"


def text(found: Estimate, digits: int) -> str:
    low, high = (f"{bound:.{digits}f}" for bound in (found.low, found.high))
    return f"{found.value:.{digits}f} [{low}, {high}]"


PANELS = {
    "around": "acting weights",
    "sampled": "newest weights, sampled",
    "newest": "newest weights, greedy",
}


def figure(scores: Scores) -> Figure:
    """Each score over the lag, a line for each objective."""
    lags = sorted({lag for _, lag in scores.settings})
    at = dict(zip(lags, positions([str(lag) for lag in lags]), strict=True))
    names = list(dict.fromkeys(name for name, _ in scores.settings))
    looks = {name: line_look(number) | {"markersize": 4.5} for number, name in enumerate(names)}
    key: Key = list(looks.items())
    xlabel = f"lag\n(updates of {scores.steps} gradient steps)"
    drawn, axes = panels(list(PANELS.values()), 2.4, xlabel, "mean return", key)
    for one, score in zip(axes, PANELS, strict=True):
        for name in names:
            own = [setting for setting in scores.settings if setting[0] == name]
            # Without lag, all objectives are the same.
            own = own if (name, 0) in own else [("behaviour", 0), *own]
            means = [student(scores.of(setting, score).to_numpy()) for setting in own]
            bars = [[m.value - m.low, m.high - m.value] for m in means]
            one.errorbar(
                [at[lag] for _, lag in own],
                [m.value for m in means],
                yerr=np.nan_to_num(np.array(bars).T),
                capsize=2,
                elinewidth=1.1,
                **looks[name],
            )
        one.set_xticks(list(at.values()), [str(lag) for lag in lags])
    return drawn


def seed_range(text: str) -> range:
    """`4-10` has both ends."""
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="the directory of the sweep")
    parser.add_argument("--study", choices=STUDIES, help="whose hypotheses; by default its name's")
    parser.add_argument("--seeds", type=seed_range, help="the first and the last, as 4-10")
    parser.add_argument("--figure", type=Path, help="where to write it, as .png")
    arguments = parser.parse_args(argv)
    study = arguments.study or arguments.sweep.name
    if study not in STUDIES:
        parser.error(f"{study} is no study: --study is one of {', '.join(STUDIES)}")
    try:
        scores = read_scores(arguments.sweep, arguments.seeds)
        print("\n".join(lines(scores, STUDIES[study]())))
    except ValueError as error:
        parser.error(str(error))
    if arguments.figure:
        picture = draw(lambda: figure(scores), study, "")
        assert picture is not None
        arguments.figure.write_bytes(picture.png)


if __name__ == "__main__":
    main()
