"""How often fewer seeds would have shown an effect: the tests of docs/findings/comparing_runs.md.

    .venv/bin/python docs/findings/seeds.py --compare outputs/objectives_at_lag sync.lag=0
        [--compare outputs/clip_lag algo.clip=0.2 …] [--figure seeds.png]

Each setting of a sweep is compared with the setting that has the same options but this value.
Effects have a p below 0.05 with all seeds, corrected within the sweep. "None" compares two halves
of the runs of one setting. The figure shows how often a test finds either with fewer seeds.
Settings whose scores are the same to the bit, as of two sweeps that share runs, count once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.report.drawing import Key, draw, line_look, panels  # noqa: E402
from harness.report.runs import read_runs  # noqa: E402
from harness.report.scores import TRAINED, mean_return  # noqa: E402
from harness.report.settings import arrange  # noqa: E402
from harness.report.statistics import holm, paired_test, student_quantile  # noqa: E402

DRAWS = 2_000
DIVISIONS = 20  # of the runs of a setting
SEEDS = (2, 3, 5, 10)
FEWEST = 5  # seeds of a setting that is compared
SHARE = 0.1  # of the baseline: what a reader of one curve calls a difference
CLASSES = ((1.5, "large"), (0.75, "middle"), (0.0, "small"))  # in pooled standard deviations
ABSENT = "none"


class Pair(NamedTuple):
    """Scores of a setting and of its baseline, seed by seed."""

    scores: np.ndarray
    baseline: np.ndarray

    @property
    def size(self) -> float:
        """The difference in pooled standard deviations."""
        pooled = np.sqrt((self.scores.var(ddof=1) + self.baseline.var(ddof=1)) / 2)
        return float(abs(self.scores.mean() - self.baseline.mean()) / pooled)


def read_settings(sweep: Path) -> pd.DataFrame:
    """The scores: a row for each setting, named by its options that differ; a column a seed."""
    runs, records = read_runs([sweep], (TRAINED,))
    plan = arrange(runs)
    rows = {}
    for task in plan.tasks:
        named = plan.settings.loc[task][plan.names[task]]
        for setting, chosen in plan.counted(task).groupby("setting"):
            options = named.loc[setting].items()
            rows[frozenset(f"{name}={value}" for name, value in options)] = {
                seed: mean_return(records[records["run"] == run])
                for run, seed in chosen["seed"].items()
            }
    table = pd.DataFrame(list(rows.values())).sort_index(axis="columns")
    return table.set_axis(pd.Index(list(rows), tupleize_cols=False))


def pairs(settings: pd.DataFrame, baseline: str) -> list[Pair]:
    """Each setting beside the one that has the baseline's value instead, seed by seed."""
    option = baseline.partition("=")[0] + "="
    found = []
    for setting in settings.index:
        if baseline in setting:
            continue
        rest = frozenset(name for name in setting if not name.startswith(option))
        if (other := rest | {baseline}) in settings.index:
            both = settings.loc[[setting, other]].dropna(axis="columns").to_numpy()
            if both.shape[1] < FEWEST:
                raise ValueError(f"{', '.join(sorted(setting))}: fewer than {FEWEST} seeds to pair")
            found.append(Pair(*both))
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
    """With one run each: the share of the right sign, and of differences above a tenth."""
    differences = np.subtract.outer(pair.scores, pair.baseline)
    sign = np.sign(pair.scores.mean() - pair.baseline.mean())
    large = np.abs(differences) > SHARE * abs(pair.baseline.mean())
    return float((np.sign(differences) == sign).mean()), float(large.mean())


def halves(settings: pd.DataFrame, random: np.random.Generator) -> list[Pair]:
    """The runs of each setting, divided at random as if they were of two, several times."""
    divided = []
    for _, row in settings.iterrows():
        scores = row.dropna().to_numpy()
        half = len(scores) // 2
        for _ in range(DIVISIONS):
            order = random.permutation(len(scores))
            divided.append(Pair(scores[order[:half]], scores[order[half : 2 * half]]))
    return divided


def effects(tables: Sequence[tuple[pd.DataFrame, str]]) -> tuple[dict[str, list[Pair]], int, int]:
    """The comparisons by class of effect, how many there are, and how many were met again."""
    classes: dict[str, list[Pair]] = {name: [] for _, name in CLASSES} | {ABSENT: []}
    compared = repeated = 0
    known: set[bytes] = set()
    random = np.random.default_rng(0)
    for settings, baseline in tables:
        found = pairs(settings, baseline)
        p_values = holm([paired_test(*pair)[1] for pair in found])
        for pair, p in zip(found, p_values, strict=True):
            if not _is_new(np.stack(pair), known):
                repeated += 1
                continue
            compared += 1
            if p < 0.05:
                classes[next(name for least, name in CLASSES if pair.size >= least)].append(pair)
        new = [_is_new(row.dropna().to_numpy(), known) for _, row in settings.iterrows()]
        classes[ABSENT] += halves(settings[new], random)
    return classes, compared, repeated


def _is_new(scores: np.ndarray, known: set[bytes]) -> bool:
    """Whether these scores are met for the first time."""
    content = scores.tobytes()
    is_new = content not in known
    known.add(content)
    return is_new


def power(chosen: Sequence[Pair], num_seeds: int, random: np.random.Generator) -> float:
    """The share of tests with so many seeds that find an effect; NaN if no setting has as many."""
    enough = [pair for pair in chosen if len(pair.scores) >= num_seeds]
    return float(np.mean([shares(pair, num_seeds, random) for pair in enough] or np.nan))


def lines(classes: Mapping[str, Sequence[Pair]], compared: int, repeated: int) -> Iterator[str]:
    there = sum(len(chosen) for name, chosen in classes.items() if name != ABSENT)
    yield f"{there} of {compared} comparisons are significant with all seeds"
    if repeated:
        yield f"{repeated} more have the same scores as one of them, to the bit, and count once"
    heads = ["right sign, 1 run", "more than a tenth, 1 run"]
    heads += [f"p < 0.05, {num_seeds} seeds" for num_seeds in SEEDS]
    yield f"| effect | number | {' | '.join(heads)} |"
    yield f"|---|--:|--:|--:|{'--:|' * len(SEEDS)}"
    random = np.random.default_rng(0)
    for name, chosen in classes.items():
        if not chosen:
            continue
        signs, large = zip(*(single(pair) for pair in chosen), strict=True)
        powers = [power(chosen, num_seeds, random) for num_seeds in SEEDS]
        cells = ["" if name == ABSENT else f"{np.mean(signs):.0%}", f"{np.mean(large):.0%}"]
        cells += ["" if np.isnan(share) else f"{share:.0%}" for share in powers]
        yield f"| {name} | {len(chosen)} | {' | '.join(cells)} |"


def figure(classes: Mapping[str, Sequence[Pair]]) -> Figure:
    """How often a test finds an effect, over the number of seeds."""
    key: Key = [(name, line_look(number)) for number, name in enumerate(classes) if classes[name]]
    drawn, (axis,) = panels(["of 2,000 draws"], 3.0, "seeds", "share with p < 0.05", key)
    random = np.random.default_rng(0)
    for name, look in key:
        axis.plot(SEEDS, [power(classes[name], count, random) for count in SEEDS], **look)
    axis.axhline(0.05, color="#999999", linewidth=0.7)
    axis.set_xticks(SEEDS)
    axis.set_ylim(0, 1.03)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--compare",
        nargs=2,
        action="append",
        required=True,
        metavar=("SWEEP", "OPTION=VALUE"),
        help="a sweep's directory, and what its settings are compared with",
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="a PNG of the shares")
    arguments = parser.parse_args()
    try:
        classes, compared, repeated = effects(
            [(read_settings(Path(sweep)), baseline) for sweep, baseline in arguments.compare]
        )
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(lines(classes, compared, repeated)))
    if arguments.figure:
        picture = draw(lambda: figure(classes), "seeds", "")
        assert picture is not None
        arguments.figure.write_bytes(picture.png)


if __name__ == "__main__":
    main()
