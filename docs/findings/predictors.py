"""Which measure of staleness tells best how much is lost: lag, effective sample size or KL.

    .venv/bin/python docs/findings/predictors.py outputs/staleness outputs/staleness_minatar ...

Each point is a task, an objective and a lag, as the mean over its seeds. Its damage is the mean
return over training that it lacks against the same objective at lag 0, as a share of the largest
such loss on the task. The table has Spearman's rank correlation of damage with each measure, within
every task and over all points; 1 means that the measure orders the points as the damage does.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import spearmanr

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.report.runs import read_runs  # noqa: E402
from harness.report.scores import TRAINED, mean_return  # noqa: E402

MEASURES = ("lag", "1 - ESS", "KL")


@dataclass
class Point:
    """The mean over the seeds of one setting."""

    task: str
    objective: str
    lag: int
    score: float
    measures: tuple[float, ...]  # as in MEASURES


def scored_runs(places: Sequence[Path]) -> pd.DataFrame:
    """The runs that are done, with their mean return over training and what tables call them."""
    runs, records = read_runs(places, (TRAINED,))
    runs = runs[runs["state"] == "done"]
    scores = {run: mean_return(inside) for run, inside in records.groupby("run")}
    return runs.assign(
        score=runs.index.map(scores),
        objective=runs["options"].map(objective_of),
        task=[str(options["env.id"]) for options in runs["options"]],
        lag=[options.get("sync.lag") for options in runs["options"]],
    )


def points(runs: pd.DataFrame) -> list[Point]:
    """All settings with an exact lag."""
    exact = runs[[isinstance(lag, int) for lag in runs["lag"]]]
    return [
        Point(task, objective, lag, inside["score"].mean(), measures(lag, inside))
        for (task, objective, lag), inside in exact.groupby(["task", "objective", "lag"])
    ]


def objective_of(options: Mapping[str, Any]) -> str:
    """What a run's objective is called in tables."""
    corrected = " with V-trace" if options.get("algo.vtrace") else ""
    return f"{options['algo.objective']}{corrected}"


def measures(lag: int, runs: pd.DataFrame) -> tuple[float, ...]:
    ess, kl = (float(runs[f"summary.policy/{name}"].mean()) for name in ("ess", "kl"))
    return (float(lag), 1 - ess, kl)


def damages(found: Sequence[Point]) -> list[float]:
    """What each point lacks against lag 0, as a share of the task's largest loss."""
    settings = {(point.task, point.objective) for point in found}
    fresh = {(point.task, point.objective): point.score for point in found if point.lag == 0}
    if missing := settings - fresh.keys():
        raise ValueError(f"no run at lag 0 for {sorted(missing)}")
    lost = [fresh[point.task, point.objective] - point.score for point in found]
    largest: dict[str, float] = defaultdict(float)
    for point, loss in zip(found, lost, strict=True):
        largest[point.task] = max(largest[point.task], loss)
    return [loss / (largest[point.task] or 1) for point, loss in zip(found, lost, strict=True)]


def lines(found: Sequence[Point]) -> Iterator[str]:
    """The table, in Markdown. Points at lag 0 have no damage by definition and are left out."""
    pairs = [
        (point, damage)
        for point, damage in zip(found, damages(found), strict=True)
        if point.lag > 0
    ]
    yield f"| task | points | {' | '.join(MEASURES)} |"
    yield f"|---|--:|{'--:|' * len(MEASURES)}"
    for task in [*sorted({point.task for point, _ in pairs}), "all"]:
        chosen = [pair for pair in pairs if task in ("all", pair[0].task)]
        damage = [damage for _, damage in chosen]
        cells = [
            f"{spearmanr([point.measures[column] for point, _ in chosen], damage).statistic:.2f}"
            for column in range(len(MEASURES))
        ]
        yield f"| {task} | {len(chosen)} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sweeps", nargs="+", type=Path, help="directories of sweeps over sync.lag")
    try:
        print("\n".join(lines(points(scored_runs(parser.parse_args().sweeps)))))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
