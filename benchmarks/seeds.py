"""How often fewer seeds would have shown an effect: the tests of docs/findings/seeds.md.

    .venv/bin/python benchmarks/seeds.py outputs/objectives_at_lag --baseline sync.lag=0

Each setting of a sweep is compared with the setting that has the same options but the baseline's
value. Effects that are there have a corrected p below 0.05 with all seeds. Effects that are not
there compare two halves of the runs of one setting.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.report.runs import read_runs  # noqa: E402
from harness.report.scores import TRAINED, mean_return  # noqa: E402
from harness.report.statistics import holm, paired_test, student_quantile  # noqa: E402

DRAWS = 2_000
SEEDS = (2, 3, 5, 10)
LOOKS_LARGE = 0.1  # of the baseline: what a reader of one curve calls a difference
CLASSES = ((1.5, "large"), (0.75, "middle"), (0.0, "small"))  # in pooled standard deviations


class Pair(NamedTuple):
    """Scores of a setting and of its baseline, seed by seed."""

    scores: np.ndarray
    baseline: np.ndarray

    @property
    def size(self) -> float:
        """The difference in pooled standard deviations."""
        pooled = np.sqrt((self.scores.var(ddof=1) + self.baseline.var(ddof=1)) / 2)
        return float(abs(self.scores.mean() - self.baseline.mean()) / pooled)


def read_settings(sweeps: Sequence[Path]) -> pd.DataFrame:
    """A row for each setting, a column for each seed. Rows are named by the options that differ."""
    runs, records = read_runs(sweeps, (TRAINED,))
    runs = runs[runs["state"] == "done"]
    scores = {run: mean_return(inside) for run, inside in records.groupby("run")}
    options = pd.DataFrame(list(runs["options"]), index=runs.index).astype(str)
    differing = [name for name in options if options[name].nunique() > 1 and name != "seed"]
    named = [
        frozenset(f"{name}={options.loc[run, name]}" for name in differing) for run in runs.index
    ]
    table = pd.DataFrame(
        {
            "setting": named,
            "seed": [int(seed) for seed in runs["seed"]],
            "score": [scores[run] for run in runs.index],
        }
    )
    return table.pivot_table(index="setting", columns="seed", values="score").dropna()


def pairs(settings: pd.DataFrame, baseline: str) -> list[Pair]:
    """Each setting beside the one that has the baseline's value instead."""
    option = baseline.partition("=")[0] + "="
    found = []
    for setting in settings.index:
        if baseline in setting:
            continue
        rest = frozenset(name for name in setting if not name.startswith(option))
        if (other := rest | {baseline}) in settings.index:
            found.append(
                Pair(settings.loc[[setting]].to_numpy()[0], settings.loc[[other]].to_numpy()[0])
            )
    if not found:
        raise ValueError(f"no two settings differ in {baseline!r} alone")
    return found


def shares(pair: Pair, num_seeds: int, random: np.random.Generator) -> float:
    """The share of draws of so many seeds whose difference has p < 0.05."""
    total = len(pair.scores)
    if num_seeds >= total:
        return float(paired_test(pair.scores, pair.baseline)[1] < 0.05)
    order = random.permuted(np.tile(np.arange(total), (DRAWS, 1)), axis=1)[:, :num_seeds]
    differences = (pair.scores - pair.baseline)[order]
    errors = differences.std(axis=1, ddof=1) / np.sqrt(num_seeds)
    least = student_quantile(0.975, num_seeds - 1)
    return float((np.abs(differences.mean(axis=1)) > least * errors).mean())


def single(pair: Pair) -> tuple[float, float]:
    """With one run each: the share of the right sign, and of differences that look large."""
    differences = np.subtract.outer(pair.scores, pair.baseline)
    sign = np.sign(pair.scores.mean() - pair.baseline.mean())
    large = np.abs(differences) > LOOKS_LARGE * abs(pair.baseline.mean())
    return float((np.sign(differences) == sign).mean()), float(large.mean())


def halves(settings: pd.DataFrame, random: np.random.Generator) -> list[Pair]:
    """The runs of each setting, divided at random as if they were of two."""
    divided = []
    for scores in settings.to_numpy():
        order = random.permutation(len(scores))
        half = len(scores) // 2
        divided.append(Pair(scores[order[:half]], scores[order[half : 2 * half]]))
    return divided


def lines(settings: pd.DataFrame, baseline: str) -> Iterator[str]:
    random = np.random.default_rng(0)
    compared = pairs(settings, baseline)
    p_values = holm([paired_test(*pair)[1] for pair in compared])
    there = [pair for pair, p in zip(compared, p_values, strict=True) if p < 0.05]
    yield f"{len(there)} of {len(compared)} comparisons with {baseline} are told apart from zero"
    heads = [f"p < 0.05, {num_seeds} seeds" for num_seeds in SEEDS]
    yield f"| effect | number | right sign, 1 run | looks large, 1 run | {' | '.join(heads)} |"
    yield f"|---|--:|--:|--:|{'--:|' * len(SEEDS)}"
    rest = there
    for least, name in CLASSES:
        inside = [pair for pair in rest if pair.size >= least]
        rest = [pair for pair in rest if pair.size < least]
        if inside:
            yield _row(name, inside, random)
    yield _row("not there", halves(settings, random), random)


def _row(name: str, chosen: Sequence[Pair], random: np.random.Generator) -> str:
    signs, large = zip(*(single(pair) for pair in chosen), strict=True)
    cells = [f"{np.mean(signs):.0%}", f"{np.mean(large):.0%}"]
    for num_seeds in SEEDS:
        enough = [pair for pair in chosen if len(pair.scores) >= num_seeds]
        told = [shares(pair, num_seeds, random) for pair in enough]
        cells.append(f"{np.mean(told):.0%}" if told else "")
    return f"| {name} | {len(chosen)} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sweeps", nargs="+", type=Path, help="directories of sweeps of one task")
    parser.add_argument(
        "--baseline", required=True, help="option=value that others are compared with"
    )
    arguments = parser.parse_args()
    try:
        print("\n".join(lines(read_settings(arguments.sweeps), arguments.baseline)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
