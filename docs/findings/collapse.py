"""Whether the effective sample size falls before a run collapses: docs/findings/objectives.md.

    .venv/bin/python docs/findings/collapse.py --task LunarLander outputs/rate_lag …
        [--task tokens outputs/rate_lag_tokens …] [--first 10]

A threshold for the alarm is chosen on a task's runs with odd seeds and judged on those with even
ones: for the sample size, the divergence and the largest weight. Runs that are the same to the bit,
as of two sweeps with settings in common, count once. A table has how many runs of each objective
collapse at each lag, and without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.report.runs import read_runs  # noqa: E402
from harness.report.scores import TRAINED, mean_return  # noqa: E402

SMOOTH = 10  # records
STAYS = 10  # records below, so that it is a collapse
LEAD = 30  # records before a collapse in which an alarm counts
ROSE = 0.2  # of the task's range, before there is anything to lose
FELL = 0.5  # of what was gained
# Each measure, and whether it is alarming when it is large.
MEASURES = {"policy/ess": False, "policy/kl": True, "policy/ratio_max": True}
THRESHOLDS = 50  # that are tried
RESAMPLES = 2_000
FEWEST = 20  # collapses on a task


class Setting(NamedTuple):
    """What the runs of a setting have in common."""

    objective: str
    learning_rate: str
    lag: int


@dataclass
class Course:
    """One run: its smoothed measures, and the record at which it collapsed, if it did."""

    setting: Setting
    seed: int
    collapse: int | None
    measures: dict[str, np.ndarray]
    sizes: np.ndarray  # the effective sample size, not smoothed
    recovers: bool = False  # ends with more than half of what it had gained


def read_courses(sweeps: Sequence[Path], num_first: int = 1) -> tuple[list[Course], int]:
    """The finished runs, and how many of them are the same as another and left out."""
    runs, records = read_runs(sweeps, (TRAINED, *MEASURES))
    runs = runs[runs["state"] == "done"]
    by_run, known, repeated = {}, set(), 0
    for run, inside in records.groupby("run"):
        if run not in runs.index:
            continue
        inside = inside.dropna(subset=[TRAINED])
        content = inside[TRAINED].to_numpy().tobytes()
        if content in known:
            repeated += 1
        else:
            known.add(content)
            by_run[run] = inside
    first = {run: float(inside[TRAINED].iloc[:num_first].mean()) for run, inside in by_run.items()}
    best = max(mean_return(inside) for inside in by_run.values())
    span = best - float(np.mean(list(first.values())))
    courses = []
    for run, inside in by_run.items():
        options = runs.loc[run, "options"]
        setting = Setting(
            str(options.get("algo.objective")),
            str(options.get("algo.learning_rate")),
            int(options["sync.lag"]),
        )
        measures = {name: smooth(inside[name]) for name in MEASURES if inside[name].notna().any()}
        skipped = num_first - 1
        returns = smooth(inside[TRAINED])[skipped:]
        moment = collapse(returns, first[run], span)
        recovers = moment is not None and not is_low(returns, first[run])[-1]
        moment = None if moment is None else moment + skipped
        sizes = inside["policy/ess"].to_numpy()
        seed = int(runs.loc[run, "seed"])
        courses.append(Course(setting, seed, moment, measures, sizes, recovers))
    return courses, repeated


def smooth(values: pd.Series) -> np.ndarray:
    return values.rolling(SMOOTH, min_periods=1).mean().to_numpy()


def collapse(returns: np.ndarray, first: float, span: float) -> int | None:
    """The record at which the smoothed return has lost half of what it gained, for good."""
    low = is_low(returns, first) & (np.maximum.accumulate(returns) - first >= ROSE * span)
    for start in np.flatnonzero(low):
        if start + STAYS <= len(low) and low[start : start + STAYS].all():
            return int(start)
    return None


def is_low(returns: np.ndarray, first: float) -> np.ndarray:
    """Where half of what was gained so far is lost."""
    highest = np.maximum.accumulate(returns)
    low: np.ndarray = highest - returns > FELL * (highest - first)
    return low


def alarm(measure: np.ndarray, threshold: float, is_large: bool, until: int | None) -> int | None:
    """The first record that is alarming, before the collapse if there is one."""
    values = np.maximum.accumulate(measure) if is_large else measure
    alarming = values > threshold if is_large else values < threshold
    places = np.flatnonzero(alarming[:until])
    return int(places[0]) if len(places) else None


def outcomes(
    courses: Sequence[Course], name: str, threshold: float
) -> tuple[list[bool], list[bool]]:
    """Of each collapse: was there an alarm in time? Of each other run: was there one?"""
    caught, false_alarms = [], []
    for course in courses:
        place = alarm(course.measures[name], threshold, MEASURES[name], course.collapse)
        if course.collapse is None:
            false_alarms.append(place is not None)
        else:
            caught.append(place is not None and course.collapse - place <= LEAD)
    return caught, false_alarms


def worth(caught: Sequence[bool] | np.ndarray, false_alarms: Sequence[bool] | np.ndarray) -> float:
    """The share of collapses with an alarm, minus that of other runs with one."""
    found = np.mean(caught) if len(caught) else 0.0
    return float(found - (np.mean(false_alarms) if len(false_alarms) else 0.0))


def choose(courses: Sequence[Course], name: str) -> float:
    """The threshold that is worth most on these runs."""
    return max(
        thresholds(courses, name), key=lambda threshold: worth(*outcomes(courses, name, threshold))
    )


def thresholds(courses: Sequence[Course], name: str) -> list[float]:
    """What is tried: quantiles of the measure over all records."""
    everything = np.concatenate([course.measures[name] for course in courses])
    return np.unique(np.nanquantile(everything, np.linspace(0, 1, THRESHOLDS))).tolist()


def lines(courses: Sequence[Course]) -> Iterator[str]:
    """What is said of the runs of one task, all of which have a lag."""
    fallen = [course for course in courses if course.collapse is not None]
    back = sum(course.recovers for course in fallen)
    yield f"{len(fallen)} of {len(courses)} runs with lag collapsed; {back} of them recover"
    if len(fallen) < FEWEST:
        yield f"fewer than {FEWEST}: the question cannot be answered on this task"
        return
    odd, even = halves(courses)
    yield "| measure | threshold | collapses with an alarm | too early | other runs | worth |"
    yield "|---|--:|--:|--:|--:|--:|"
    chosen = {name: choose(odd, name) for name in MEASURES}
    judged = {}
    for name, threshold in chosen.items():
        caught, false_alarms = judged[name] = outcomes(even, name, threshold)
        low, high = interval([worth(*drawn) for drawn in resampled(caught, false_alarms)])
        before = [
            alarm(course.measures[name], threshold, MEASURES[name], course.collapse)
            for course in even
            if course.collapse is not None
        ]
        earlier = sum(place is not None for place in before) - sum(caught)
        yield (
            f"| {name} | {threshold:.3g} | {sum(caught)} of {len(caught)} | {earlier} | "
            f"{sum(false_alarms)} of {len(false_alarms)} | "
            f"{worth(caught, false_alarms):.2f} [{low:.2f}, {high:.2f}] |"
        )
    first, *others = MEASURES
    for name in others:
        # The same runs are drawn for both.
        pairs = zip(resampled(*judged[first]), resampled(*judged[name]), strict=True)
        low, high = interval([worth(*one) - worth(*other) for one, other in pairs])
        better = worth(*judged[first]) - worth(*judged[name])
        yield f"{first} is worth {better:.2f} [{low:.2f}, {high:.2f}] more than {name}"
    yield from _within_settings(courses)
    yield _of_known_settings(odd, even)
    yield ""
    yield from _by_lag(even, first, chosen[first], {course.setting for course in fallen})


def halves(courses: Sequence[Course]) -> tuple[list[Course], list[Course]]:
    """The runs with odd seeds, on which thresholds are chosen, and those with even seeds."""
    parts: tuple[list[Course], list[Course]] = ([], [])
    for course in courses:
        parts[1 - course.seed % 2].append(course)
    return parts


def resampled(
    caught: Sequence[bool], false_alarms: Sequence[bool]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Runs drawn with repetition, always the same ones."""
    random = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        yield random.choice(caught, len(caught)), random.choice(false_alarms, len(false_alarms))


def interval(drawn: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def _of_known_settings(odd: Sequence[Course], even: Sequence[Course]) -> str:
    """What an alarm without any measure does: in each setting of which an odd seed collapsed."""
    known = {course.setting for course in odd if course.collapse is not None}
    caught, others = [
        [course.setting in known for course in even if (course.collapse is not None) is falls]
        for falls in (True, False)
    ]
    return (
        f"settings in which an odd seed collapsed have {sum(caught)} of {len(caught)} collapses "
        f"and {sum(others)} of {len(others)} other runs of the even seeds"
    )


def _within_settings(courses: Sequence[Course]) -> Iterator[str]:
    """Sample size before the collapse, against runs of the same setting that do not collapse."""
    by_setting: list[list[float]] = []
    for setting in sorted({course.setting for course in courses}):
        inside = [course for course in courses if course.setting == setting]
        rest = [course for course in inside if course.collapse is None]
        differences = []
        for course in inside:
            if course.collapse is None or not rest:
                continue
            span = slice(max(0, course.collapse - 20), course.collapse)
            here = np.mean(course.sizes[span])
            there = np.mean([np.mean(one.sizes[span]) for one in rest])
            differences.append(float(here - there))
        if differences:
            by_setting.append(differences)
    if not by_setting:
        yield "within settings: no setting has runs that collapse and runs that do not"
        return
    everything = np.concatenate(by_setting)
    random = np.random.default_rng(0)
    drawn = [
        float(np.mean(np.concatenate([by_setting[place] for place in places])))
        for places in random.integers(len(by_setting), size=(RESAMPLES, len(by_setting)))
    ]
    low, high = interval(drawn)
    yield (
        f"within settings: before {(everything < 0).sum()} of {len(everything)} collapses the "
        f"sample size was lower than in runs that did not collapse; the mean difference is "
        f"{everything.mean():.3f} [{low:.3f}, {high:.3f}] over {len(by_setting)} settings"
    )


def _by_lag(
    courses: Sequence[Course], name: str, threshold: float, fallen: Collection[Setting]
) -> Iterator[str]:
    """The same threshold at each lag, and in settings of which some run collapses."""
    parts = {
        f"lag {lag}": [course for course in courses if course.setting.lag == lag]
        for lag in sorted({course.setting.lag for course in courses})
    }
    parts["settings with a collapse"] = [course for course in courses if course.setting in fallen]
    yield f"| {name} | collapses with an alarm | other runs |"
    yield "|---|--:|--:|"
    for part, inside in parts.items():
        caught, false_alarms = outcomes(inside, name, threshold)
        cells = (f"{sum(one)} of {len(one)}" for one in (caught, false_alarms))
        yield f"| {part} | {' | '.join(cells)} |"


def by_objective(courses: Sequence[Course]) -> Iterator[str]:
    """How many runs of each objective collapse at each lag, and the mean of their sample size."""
    lags = sorted({course.setting.lag for course in courses})
    yield f"| objective | {' | '.join(f'lag {lag}' for lag in lags)} |"
    yield f"|---|{'--:|' * len(lags)}"
    for objective in sorted({course.setting.objective for course in courses}):
        cells = []
        for lag in lags:
            inside = [
                c for c in courses if (c.setting.objective, c.setting.lag) == (objective, lag)
            ]
            fallen = sum(course.collapse is not None for course in inside)
            size = np.mean([course.sizes.mean() for course in inside] or np.nan)
            cells.append(f"{fallen} of {len(inside)}, {size:.2f}" if inside else "")
        yield f"| {objective} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--task",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "SWEEP"),
        help="a task and the directories of its sweeps",
    )
    parser.add_argument(
        "--first",
        type=int,
        default=1,
        metavar="N",
        help="records whose mean is the return that a run begins with, and from the last of which "
        "on a collapse is looked for (the study's: 1)",
    )
    arguments = parser.parse_args()
    if arguments.first < 1:
        parser.error(f"--first {arguments.first}: it must be 1 or more")
    for name, *sweeps in arguments.task:
        try:
            courses, repeated = read_courses([Path(sweep) for sweep in sweeps], arguments.first)
        except ValueError as error:
            parser.error(f"{name}: {error}")
        print(
            name, f"{repeated} runs are the same as another, to the bit, and count once", sep="\n"
        )
        print(*by_objective(courses), "", sep="\n")
        print(*lines([course for course in courses if course.setting.lag >= 1]), sep="\n")


if __name__ == "__main__":
    main()
