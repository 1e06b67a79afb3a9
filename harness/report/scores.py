"""Every number of a report, computed from the runs; nothing here draws or writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from gymnasium.envs.registration import registry

from harness.errors import suggest
from harness.measures import PHASES
from harness.report.comparisons import DEFAULT_MARGIN, Margin, compare_pairs, interactions
from harness.report.design import Design
from harness.report.runs import FRAMEWORK, OURS
from harness.report.settings import SOURCE, Options, Plan, values_of
from harness.report.statistics import (
    MEASURES,
    Estimate,
    band,
    estimate,
    interpolate,
    optimality_gap,
    student,
    trailing_mean,
)
from harness.report.text import show_progress

EVALUATED, SAMPLED, TRAINED = "eval/return", "eval/return_sampled", "episode/return"
VIRTUAL_TIME = "sim/time_s"
# The metrics that are read of a run's records.
WANTED = (
    "time",
    VIRTUAL_TIME,
    EVALUATED,
    SAMPLED,
    TRAINED,
    *(f"time/{phase}_s" for phase in PHASES),
)
# What each score is called on the page. Means are over training.
NEWEST, NEWEST_SAMPLED, ACTING = (f"mean {name}" for name in (EVALUATED, SAMPLED, TRAINED))
WORDS = {
    NEWEST: "return of the newest weights",
    NEWEST_SAMPLED: "return of the newest weights, sampled",
    ACTING: "return of the acting weights",
    EVALUATED: "return of the last policy",
    TRAINED: "return of the last 100 training episodes",
}
CURVE_WORDS = {
    EVALUATED: WORDS[NEWEST],
    SAMPLED: WORDS[NEWEST_SAMPLED],
    TRAINED: WORDS[ACTING],
}
AXES = ("frames", "seconds", "virtual seconds")  # of curves; the last are a simulated cluster's
POINTS = 101  # of a curve's grid
SMOOTHING = 0.05  # of a run's length: the window of a curve's trailing mean
FEWEST_EVALUATIONS = 5  # while training, of every run: fewer make no mean over training
LOST = 0.5  # of its gain: what a collapsed run has lost at least
LEAST_GAIN = 0.2  # of the largest gain of any run: a run that gained less cannot collapse
LAG = "summary.policy/lag_updates_mean"
BUFFER = "algo.buffer_size"  # an option of algorithms that learn from a replay buffer
LEAST_DELAY = 0.5  # updates
# Scores that a person may ask for in place of the mean over training of the newest weights.
ACTING_WEIGHTS, EVALUATION = "acting", "evaluation"
PER_1000 = " seconds for 1000 frames"  # ends the name of a phase among the medians
BAND = ["x", "value", "low", "high", "seeds"]
CURVES = ["task", "metric", "setting", "axis", *BAND]
RESPONSE = ["metric", "panel", "line", "x", "task", "setting", "value", "low", "high", "seeds"]
RESPONSE += ["verdict"]
Records = Mapping[int, pd.DataFrame]  # by run


@dataclass
class Score:
    """What the runs of a task scored by one metric.

    scores       a row for each setting in order, a column for each seed; NaN without a score
    estimates    (setting, measure) → estimate over the seeds
    comparisons, interactions    tables of harness/report/comparisons.py
    """

    task: str
    metric: str
    scores: pd.DataFrame
    unscored: list[str]  # the names of finished runs without this score
    lacking: str  # why they have none
    target: float | None = None
    is_primary: bool = False  # whether the verdict is about this score
    estimates: dict[tuple[str, str], Estimate] = field(default_factory=dict)
    baseline: str | None = None  # if all are compared with one setting
    against: str = ""  # what each setting is compared with, in words
    comparisons: pd.DataFrame = field(default_factory=lambda: compare_pairs(pd.DataFrame(), []))
    interactions: pd.DataFrame = field(default_factory=pd.DataFrame)
    delays: dict[str, float] = field(default_factory=dict)  # by setting: see `_delays`

    @property
    def words(self) -> str:
        """What the score is, for a reader."""
        return WORDS.get(self.metric, self.metric)

    def __post_init__(self) -> None:
        measures = dict(MEASURES)
        if self.target is not None:
            measures["gap"] = optimality_gap(self.target)
        for setting in self.scored:
            for name, measure in measures.items():
                self.estimates[setting, name] = estimate(self.of(setting), measure)

    def of(self, setting: str) -> np.ndarray:
        """The scores of a setting, by ascending seed."""
        return self.scores.loc[setting].dropna().to_numpy(float)

    @property
    def scored(self) -> list[str]:
        """The settings that have scores."""
        return list(self.scores.index[self.scores.notna().any(axis=1)])


@dataclass
class Report:
    """All numbers.

    scores      of each task in order: its final score; then, if runs are done, the means over
                training of the newest weights, greedy and sampled, if all of its runs were
                evaluated while training, and of the acting weights
    collapsed   by run: whether it has collapsed; NaN for runs that were not evaluated
    not_evaluated    task → the names of its finished runs without enough evaluations
    curves      task, metric, setting, axis, and the columns of a band
    returns     the same of all returns, by frames, of tasks with one setting that was evaluated
    medians     (task, setting) → medians over seeds of the numbers of summaries, and of the seconds
                for 1000 frames in each phase of the loop
    """

    plan: Plan
    scores: list[Score]
    curves: pd.DataFrame
    returns: pd.DataFrame
    medians: pd.DataFrame
    margin: Margin
    design: Design | None = None
    collapsed: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))
    not_evaluated: dict[str, list[str]] = field(default_factory=dict)

    def final(self, task: str) -> Score:
        return next(score for score in self.scores if score.task == task)

    def score(self, task: str, metric: str) -> Score | None:
        """The score of a task by this metric, if there is one."""
        return next((s for s in self.scores if (s.task, s.metric) == (task, metric)), None)

    def num_collapsed(self, task: str, setting: str) -> tuple[int, int] | None:
        """Of the runs of a setting: how many have collapsed, and how many were evaluated."""
        return self._num_collapsed.get((task, setting))

    @cached_property
    def _num_collapsed(self) -> dict[tuple[str, str], tuple[int, int]]:
        values = self.collapsed.dropna()
        runs = self.plan.runs.loc[values.index]
        groups = values.groupby([runs["task"], runs["setting"]])
        return {key: (int(group.sum()), len(group)) for key, group in groups}

    @cached_property
    def response(self) -> pd.DataFrame:
        """The primary score of every setting in its place in the design, panel by panel."""
        return _respond(self)

    @property
    def primary(self) -> list[Score]:
        """The score of each task that the verdict is about."""
        return [score for score in self.scores if score.is_primary]


def analyse(
    plan: Plan,
    records: pd.DataFrame,
    *,
    metric: str | None = None,
    score: str | None = None,
    baseline: str | None = None,
    target: float | None = None,
    margin: Margin = DEFAULT_MARGIN,
    by_source: bool = False,
    design: Design | None = None,
    interaction: str | None = None,
) -> Report:
    """The numbers of every task.

    A `baseline` is a setting, or `option=value`: then each setting is compared with the one that
    has this value and is otherwise the same. With a `design` it is the first value of x.
    """
    numbers = summaries(plan.runs)
    if metric is not None and len(numbers.columns) and metric not in numbers:
        raise ValueError(f"--metric is {metric!r}; {suggest(metric, numbers.columns)}")
    by_run = dict(iter(with_clocks(records).groupby("run")))
    scores: list[Score] = []
    curves, returns, collapsed = [], [], []
    for task in plan.tasks:
        show_progress(f"statistics of {task}")
        scores_of_task = _scores(plan, task, by_run, metric, score, target)
        scores += scores_of_task
        runs = plan.counted(task)
        evaluated = is_evaluated(runs, by_run)
        curves.append(_curves(runs, by_run, EVALUATED if evaluated else TRAINED))
        if evaluated and len(plan.labels(task)) == 1:
            metrics = [m for m in CURVE_WORDS if m == TRAINED or is_evaluated(runs, by_run, m)]
            returns += [_curves(runs, by_run, metric, AXES[:1]) for metric in metrics]
        collapsed.append(_collapsed(plan, task, by_run))
    report = Report(
        plan,
        scores,
        _stacked(curves, CURVES),
        _stacked(returns, CURVES),
        _medians(plan),
        margin,
        design,
        pd.concat(collapsed) if collapsed else pd.Series(dtype=float),
        {task: not_evaluated(plan.counted(task), by_run) for task in plan.tasks},
    )
    _compare(report, baseline, by_source)
    for one in report.primary:
        if one.metric == ACTING:
            one.delays = dict(_delays(plan, one, by_run))
    if interaction is not None:
        _interact(report, interaction)
    return report


def _stacked(tables: Sequence[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    filled = [table for table in tables if len(table)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=columns)


def summaries(runs: pd.DataFrame) -> pd.DataFrame:
    """The numbers of the runs' summaries, under their own names."""
    inside = [column for column in runs if column.startswith("summary.")]
    return runs[inside].rename(columns=lambda column: column.removeprefix("summary."))


def with_clocks(records: pd.DataFrame) -> pd.DataFrame:
    """Records with `AXES` as columns.

    Seconds are those in the learner's loop, without start-up and pauses: of the phases if the
    records have them.
    """
    records = records.reindex(columns=[*dict.fromkeys([*records, *WANTED])])
    run = records["run"]
    phases = records[[name for name in WANTED if name.startswith("time/")]]
    is_timed = phases.notna().any(axis=1).groupby(run).transform("any")
    spent = phases.sum(axis=1).groupby(run).cumsum()
    since = records["time"] - records["time"].groupby(run).transform("first")
    clocks = {"frames": records["step"], "seconds": spent.where(is_timed, since)}
    return records.assign(**clocks, **{"virtual seconds": records[VIRTUAL_TIME]})


def known_target(env: str) -> float | None:
    """The return at which gymnasium calls an environment solved, if it has one."""
    spec = registry.get(env)
    return None if spec is None else spec.reward_threshold


# -- scores


def _scores(
    plan: Plan,
    task: str,
    records: Records,
    metric: str | None,
    primary: str | None,
    target: float | None,
) -> list[Score]:
    """The final score of a task, and those of its training if runs are done."""
    runs = plan.counted(task)
    numbers = summaries(runs)
    evaluated = len(runs) > 0 and EVALUATED in numbers and bool(numbers[EVALUATED].notna().all())
    is_final = primary == EVALUATION or (primary is None and metric is not None)
    name = metric or (EVALUATED if evaluated or is_final else TRAINED)
    if target is None and name in (EVALUATED, TRAINED):
        target = known_target(plan.settings.loc[task].iloc[0].get("env.id", ""))
    values = numbers.get(name, pd.Series(math.nan, runs.index))
    lacking = f"no finite {name} in summary.json"
    scores = {name: Score(task, name, *_table(plan, task, values), lacking, target)}
    if len(runs):
        means = {
            f"mean {metric}": metric
            for metric in (EVALUATED, SAMPLED)
            if is_evaluated(runs, records, metric)
        }
        for score, metric in {**means, ACTING: TRAINED}.items():
            values = pd.Series(
                [
                    mean_return(records[run], metric=metric) if run in records else math.nan
                    for run in runs.index
                ],
                runs.index,
            )
            lacking = "no episode ended"
            scores[score] = Score(task, score, *_table(plan, task, values), lacking)
    if is_final or not len(runs):
        scores[name].is_primary = True
    else:
        scores[
            NEWEST if NEWEST in scores and primary != ACTING_WEIGHTS else ACTING
        ].is_primary = True
    return list(scores.values())


def is_evaluated(runs: pd.DataFrame, records: Records, metric: str = EVALUATED) -> bool:
    """Whether each of the runs was evaluated often enough while training."""
    return len(runs) > 0 and not len(not_evaluated(runs, records, metric))


def not_evaluated(runs: pd.DataFrame, records: Records, metric: str = EVALUATED) -> list[str]:
    """The names of the runs that were not evaluated often enough while training."""
    nothing = pd.Series(dtype=float)
    return [
        name
        for run, name in runs["name"].items()
        if records.get(run, {}).get(metric, nothing).count() < FEWEST_EVALUATIONS
    ]


def _collapsed(plan: Plan, task: str, records: Records) -> pd.Series:
    """By run, whether its last policy is nearer to the start than to the run's best evaluation.

    The start is the median of the first evaluations of all runs of the task. A run that gained
    less than `LEAST_GAIN` of the largest gain cannot collapse: it has learned too little.
    """
    runs = plan.counted(task)
    if not is_evaluated(runs, records):
        return pd.Series(math.nan, runs.index)
    returns = [records[run][EVALUATED].dropna().to_numpy() for run in runs.index]
    first, last, best = (
        np.array([of(values) for values in returns])
        for of in (lambda v: v[0], lambda v: v[-1], np.max)
    )
    gains = best - np.median(first)
    learned = gains >= LEAST_GAIN * gains.max()
    lost = best - last > LOST * gains
    return pd.Series((learned & lost & (gains > 0)).astype(float), runs.index)


def _table(plan: Plan, task: str, scores: pd.Series) -> tuple[pd.DataFrame, list[str]]:
    """The scores by setting and seed, and the names of the runs that have none."""
    runs = plan.counted(task).assign(score=scores)
    table = runs.pivot(index="setting", columns="seed", values="score")
    return table.reindex(plan.labels(task)), list(runs["name"][scores.isna()])


def mean_return(records: pd.DataFrame, *, delay: float = 0.0, metric: str = TRAINED) -> float:
    """The mean return over a run's frames; NaN if no record has the metric.

    delay: by so many frames the curve is moved; the first value counts for all before.

    A record's `episode/return` is that of the episodes that ended since the record before it, and
    counts for the frames between the two. Frames without a record of their own count with the next
    one, since their episodes ended later, and those after the last one with that. An evaluation
    counts in the same way for the frames since the one before it.
    """
    pairs = records[["step", metric]].to_numpy()
    total = pairs[:, 0].max(initial=0.0)
    ends, values = pairs[~np.isnan(pairs).any(axis=1)].T
    if not len(ends) or not total:
        return math.nan
    edges = np.clip([0.0, *(ends[:-1] + delay), total], 0.0, total)
    return float(np.average(values, weights=np.diff(edges)))


def _delays(plan: Plan, score: Score, records: Records) -> Iterator[tuple[str, float]]:
    """What each setting would lose to its baseline if it learned the same with older weights.

    Its curve would be the baseline's, moved by the updates that its weights are older. Where frames
    are learned from again and again, lag is not the age of the weights that act: left out.
    """
    runs = plan.counted(score.task)
    if not {LAG, "summary.updates"} <= {*runs}:
        return
    replays = [BUFFER in options for options in runs["options"]]
    lags = runs[LAG].mask(replays).groupby(runs["setting"]).mean()
    for row in score.comparisons.itertuples():
        older = lags.get(row.setting, math.nan) - lags.get(row.baseline, math.nan)
        if not older >= LEAST_DELAY:
            continue
        moved = [
            mean_return(records[run], delay=older * base["frames"] / base["summary.updates"])
            - mean_return(records[run])
            for run, base in runs[runs["setting"] == row.baseline].iterrows()
            if run in records and base["summary.updates"]
        ]
        yield row.setting, float(np.nanmean(moved))


def _medians(plan: Plan) -> pd.DataFrame:
    """Medians over seeds, for each setting, of the numbers of summaries and of the phases."""
    runs = plan.runs[plan.runs["counts"]]
    numbers = summaries(runs)
    wall, fps, *phases = (
        numbers.get(name, pd.Series(math.nan, runs.index))
        for name in ("wall_s", "fps", *(f"time/{phase}_s" for phase in PHASES))
    )
    spent = dict(zip(PHASES, phases, strict=True))
    spent["other"] = wall - sum(phases)
    thousands = (wall * fps / 1000).where(lambda frames: frames > 0)
    shares = {f"{phase}{PER_1000}": s.clip(lower=0) / thousands for phase, s in spent.items()}
    keys = [runs["task"], runs["setting"]]
    medians = numbers.assign(**shares).groupby(keys).median()
    return medians.reindex(plan.settings.index)


# -- curves


def _curves(
    runs: pd.DataFrame, records: Records, metric: str, of: Sequence[str] = AXES
) -> pd.DataFrame:
    """Bands of a metric for each setting of a task, over the axes.

    All are on one grid, so that the figures can be compared point by point.
    """
    lines = [records[run] for run in runs.index if run in records]
    settings = [runs.at[line["run"].iloc[0], "setting"] for line in lines]
    by_axis = {axis: _bands(lines, settings, axis, metric) for axis in of}
    about = {"task": runs["task"].iloc[0] if len(runs) else "", "metric": metric}
    return _stacked(
        [
            bands[setting].assign(**about, setting=setting, axis=axis)
            for setting in dict.fromkeys(settings)
            for axis, bands in by_axis.items()
            if setting in bands
        ],
        CURVES,
    )


def _bands(
    lines: Sequence[pd.DataFrame], settings: Sequence[str], axis: str, metric: str
) -> dict[str, pd.DataFrame]:
    """By setting, over one of the axes."""
    pairs = [line[[axis, metric]].to_numpy().T for line in lines]
    curves = [pair[:, np.isfinite(pair).all(axis=0)] for pair in pairs]
    grid = np.linspace(0, max((x[-1] for x, _ in curves if len(x)), default=0), POINTS)
    by_setting: dict[str, list[np.ndarray]] = {}
    for setting, (x, y) in zip(settings, curves, strict=True):
        if len(x):
            smooth = trailing_mean(x, y, SMOOTHING * (x[-1] - x[0]))
            by_setting.setdefault(setting, []).append(interpolate(x, smooth, grid))
    return {setting: band(np.array(several), grid) for setting, several in by_setting.items()}


# -- comparisons


def _compare(report: Report, baseline: str | None, by_source: bool) -> None:
    """Every setting with its baseline, by each score."""
    has_baseline = False
    for score in report.scores:
        pairs = _pairs(report, score, baseline, by_source)
        has_baseline |= pairs is not None
        score.comparisons = compare_pairs(score.scores, pairs or [], report.margin)
    if baseline is not None and not has_baseline:
        labels = [label for task in report.plan.tasks for label in report.plan.labels(task)]
        raise ValueError(f"--baseline is {baseline!r}; {suggest(baseline, labels)}")


def _pairs(
    report: Report, score: Score, baseline: str | None, by_source: bool
) -> list[tuple[str, str]] | None:
    """Each setting and the one that it is compared with; None if there is no such baseline."""
    settings, design = report.plan.settings.loc[score.task], report.design
    names = report.plan.names[score.task]
    fixed: Options = {}
    if by_source:
        fixed = {SOURCE: settings[SOURCE].iloc[0]}
    elif baseline is not None:
        fixed = _values_named(baseline, settings, names)
    elif design is not None:
        fixed = design.first(settings)
    elif FRAMEWORK in names and OURS in set(settings[FRAMEWORK]):
        fixed = {FRAMEWORK: OURS}
    has = [values == tuple(fixed.values()) for values in values_of(settings, list(fixed))]
    same = list(settings.index[has])
    if fixed and (by_source or len(same) != 1):
        values = " and ".join(f"{key}={value}" for key, value in fixed.items())
        score.against = f"the setting with {values} that is otherwise the same"
        others = [key for key in (design.factors if design else names) if key not in fixed]
        rest = dict(zip(settings.index, values_of(settings, others), strict=True))
        bases = {rest[label]: label for label in same}
        pairs = [(label, bases.get(rest[label], label)) for label in settings.index]
        return [(label, base) for label, base in pairs if label != base] if same else None
    label = same[0] if fixed else _baseline(report.plan, score, baseline)
    if label is None:
        return None
    score.baseline = score.against = label
    return [(setting, label) for setting in settings.index if setting != label]


def _values_named(baseline: str, settings: pd.DataFrame, names: Sequence[str]) -> Options:
    """The options in `option=value+option=value`; none if it is the name of a setting."""
    if baseline in settings.index:
        return {}
    values = {}
    for part in baseline.split("+"):
        name, sign, value = part.partition("=")
        keys = [key for key in names if name in (key, key.rsplit(".", 1)[-1])]
        if not sign or len(keys) != 1:
            return {}
        values[keys[0]] = value
    return values


def _baseline(plan: Plan, score: Score, wanted: str | None) -> str | None:
    """The setting of that name, or whose name alone holds it; else the first with most seeds.

    Finished ones, with a score or without: a run without a score does not move the baseline.
    """
    labels = plan.labels(score.task)
    if wanted is None:
        finished = plan.counted(score.task)["setting"].value_counts()
        return max(score.scored, key=lambda label: finished[label], default=None)
    if wanted in labels:
        return wanted
    holding = [label for label in labels if wanted in label]
    if len(holding) > 1:
        raise ValueError(f"--baseline {wanted!r} may be {', '.join(holding)}: name one of them")
    return holding[0] if holding else None


def _interact(report: Report, interaction: str) -> None:
    plan = report.plan
    for score in report.scores:
        settings, names = plan.settings.loc[score.task], plan.names[score.task]
        score.interactions = interactions(settings, names, score.scores, interaction, report.margin)
    if not any(len(score.interactions) for score in report.scores):
        raise ValueError(
            f"--interaction is {interaction!r}; no two values of each option occur in all four "
            "combinations"
        )


# -- over the factors of a design


def _respond(report: Report) -> pd.DataFrame:
    design = report.design
    if design is None:
        return pd.DataFrame()
    rows = []
    for score in report.primary:
        verdicts = score.comparisons.set_index("setting")["verdict"]
        for setting in score.scored:
            place = design.places.loc[(score.task, setting)].to_dict()
            place |= {"task": score.task, "metric": score.metric, "setting": setting}
            place |= {"verdict": verdicts.get(setting)}
            rows.append({**place, **student(score.of(setting))._asdict()})
    table = pd.DataFrame(rows, columns=RESPONSE)
    return table.sort_values(
        "panel", key=lambda column: column.map(design.panels.index), kind="stable"
    )
