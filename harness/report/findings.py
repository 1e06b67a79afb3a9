"""Every number of a report, computed from the runs; nothing here draws or writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from gymnasium.envs.registration import registry

from harness.metric_names import BUCKETS, PHASES
from harness.options.errors import suggest
from harness.report.comparisons import (
    DEFAULT_MARGIN,
    Comparison,
    Margin,
    compare_pairs,
    probability_of_improvement,
)
from harness.report.curves import Band, band, interpolate, profile, trailing_mean
from harness.report.design import Design
from harness.report.interactions import Interaction, interactions
from harness.report.progress import show_progress
from harness.report.read_runs import VIRTUAL_TIME, Run
from harness.report.settings import MISSING, SOURCE, Factor, Options, Plan, Setting, Task
from harness.report.statistics import MEASURES, Estimate, estimate, optimality_gap, student

EVALUATED, TRAINED = "eval/return", "episode/return"
LATENCIES = {  # metric → what it takes so long to do
    "sync/publish_ms": "publish",
    "sync/ack_ms": "acknowledge",
    "sync/apply_ms": "apply",
}
# Of the summary → what the column is called.
LAGS = {
    "policy/lag_mean": "mean",
    "policy/lag_p95": "p95",
    "policy/lag_max": "max",
    "policy/dropped": "frames not learned from",
    "collector/dropped": "frames dropped",
}
TEARING = {
    "sync/tear_rate": "torn",
    "sync/torn_calls": "calls torn",
    "sync/checked_calls": "calls checked",
}
UPDATE_LAGS = {
    "policy/lag_updates_mean": "mean",
    "policy/lag_updates_p95": "p95",
    "policy/lag_updates_max": "max",
    "policy/lag_publish_mean": "publish",
    "policy/lag_queue_mean": "queue",
    "policy/lag_train_mean": "train",
}
HEALTH = {  # of the summary, by bucket of lag → what the column is called
    "policy/share": "share of frames",
    "policy/ess": "ESS",
    "policy/kl": "KL",
    "policy/ratio_max": "largest ratio",
}
# The metrics that are read of a run's records.
WANTED = (
    "time",
    VIRTUAL_TIME,
    EVALUATED,
    TRAINED,
    *(f"time/{phase}_s" for phase in PHASES),
)
POINTS = 101  # of a curve's grid and of a profile
SMOOTHING = 0.05  # of a run's length: the window of a curve's trailing mean
FEWEST_EVALUATIONS = 10  # of every run, to be drawn as curves in place of the training's returns
LAST_TENTH, EVALUATION = "last_tenth", "evaluation"  # scores in place of the mean over training


@dataclass
class Result:
    """One setting's numbers."""

    setting: Setting
    scores: dict[int, float]  # by seed
    estimates: dict[str, Estimate]  # by measure; empty without scores
    curves: dict[str, Band] = field(default_factory=dict)  # over frames and seconds; see Run.curve
    profile: Band | None = None

    @property
    def label(self) -> str:
        return self.setting.label

    @property
    def runs(self) -> list[Run]:
        """The finished ones, one for each seed."""
        return list(self.setting.done.values())

    def has(self, *names: str) -> bool:
        """Whether the summary of a finished run has one of these numbers."""
        return any(name in run.summary for run in self.runs for name in names)

    def middle(self, name: str) -> float:
        """The median over seeds of a number of the summaries; NaN if none has it."""
        return _median([run.summary.get(name, math.nan) for run in self.runs])

    def health(self) -> dict[str, list[float]]:
        """Bucket of lag that has frames → medians over seeds of their `HEALTH`."""
        return {
            bucket: [self.middle(f"{name}/{bucket}") for name in HEALTH]
            for bucket in BUCKETS
            if self.has(*(f"{name}/{bucket}" for name in HEALTH))
        }

    def seconds_per_1000_frames(self, phase: str) -> float:
        """Of the learner's loop, the median over seeds; `other` is the time outside all phases."""
        return _median([_phase_share(run, phase) for run in self.runs])


@dataclass
class Findings:
    """One task's numbers."""

    task: Task
    score: str  # the metric that is compared
    curve: str  # the metric whose course is shown
    target: float | None
    results: list[Result]
    lacking: str = ""  # why a finished run has no score
    baseline: str | None = None  # if all are compared with one setting
    against: str = ""  # what each setting is compared with, in words
    comparisons: list[Comparison] = field(default_factory=list)
    margin: Margin = DEFAULT_MARGIN
    improvements: dict[str, Estimate] = field(default_factory=dict)  # by setting
    interactions: list[Interaction] = field(default_factory=list)
    throughout: Findings | None = None  # the same with the curve's mean as the score
    is_primary: bool = False  # whether the verdict is about this score
    design: Design | None = None

    def unscored(self) -> list[Run]:
        """The finished runs that have no score."""
        return [
            run
            for result in self.results
            for seed, run in result.setting.done.items()
            if seed not in result.scores
        ]

    def result(self, label: str) -> Result:
        return next(result for result in self.results if result.label == label)


def analyse(
    plan: Plan,
    *,
    metric: str | None = None,
    score: str | None = None,
    baseline: str | None = None,
    target: float | None = None,
    margin: Margin = DEFAULT_MARGIN,
    by_source: bool = False,
    design: Design | None = None,
    interaction: str | None = None,
) -> list[Findings]:
    """The numbers of every task.

    A `baseline` is a setting, or `option=value`: then each setting is compared with the one that
    has this value and is otherwise the same. With a `design` it is the first value of x.
    """
    found = []
    for task in plan.tasks:
        show_progress(f"statistics of {task.name}")
        found.append(_task(task, metric, score, target))
    _check_metric(metric, found)
    has_baseline = False
    for findings in every_score(found):
        findings.design, findings.margin = design, margin
        if interaction is not None:
            scores = {result.label: result.scores for result in findings.results}
            findings.interactions = interactions(findings.task.settings, scores, interaction)
        pairs = _pairs(findings, baseline, by_source)
        has_baseline |= pairs is not None
        _compare(findings, pairs or [])
    if interaction is not None and not any(f.interactions for f in every_score(found)):
        raise ValueError(
            f"--interaction is {interaction!r}; no two values of each option occur in all four "
            "combinations"
        )
    if baseline is not None and not has_baseline:
        labels = [result.label for findings in found for result in findings.results]
        raise ValueError(f"--baseline is {baseline!r}; {suggest(baseline, labels)}")
    return found


def _check_metric(metric: str | None, found: Sequence[Findings]) -> None:
    runs = [run for findings in found for result in findings.results for run in result.runs]
    names = {name for run in runs for name in run.summary}
    if metric is not None and names and metric not in names:
        raise ValueError(f"--metric is {metric!r}; {suggest(metric, names)}")


@dataclass
class Cell:
    """A setting in its place in a design."""

    panel: str
    line: str
    x: str
    findings: Findings
    result: Result
    mean: Estimate
    comparison: Comparison | None


def respond(design: Design, found: Sequence[Findings]) -> list[Cell]:
    """The score of every setting in its place, panel by panel."""
    cells = []
    for findings in found:
        compared = {comparison.name: comparison for comparison in findings.comparisons}
        for result in findings.results:
            if result.scores:
                x, line, panel = design.place(result.setting)
                mean = student(list(result.scores.values()))
                comparison = compared.get(result.label)
                cells.append(Cell(panel, line, x, findings, result, mean, comparison))
    return sorted(cells, key=lambda cell: design.panels.index(cell.panel))


def every_score(found: Sequence[Findings]) -> Iterator[Findings]:
    """The findings of each task, followed by those of its curves' means."""
    for findings in found:
        yield findings
        if findings.throughout is not None:
            yield findings.throughout


def primary(found: Sequence[Findings]) -> list[Findings]:
    """The findings of each task that the verdict is about."""
    return [findings for findings in every_score(found) if findings.is_primary]


def totals(found: Sequence[Findings]) -> dict[str, Estimate]:
    """Setting → its probability to score more than the baseline, the mean over several tasks.

    For settings that have scores in each of them, beside one baseline.
    """
    baselines = {findings.baseline for findings in found}
    baseline = next(iter(baselines), None)
    if len(found) < 2 or len(baselines) > 1 or baseline is None:
        return {}
    return {
        result.label: probability_of_improvement(
            *([_values(f.result(label)) for f in found] for label in (result.label, baseline))
        )
        for result in found[0].results
        if all(result.label in findings.improvements for findings in found)
    }


def known_target(env: str) -> float | None:
    """The return at which gymnasium calls an environment solved, if it has one."""
    spec = registry.get(env)
    return None if spec is None else spec.reward_threshold


# -- scores


def _task(task: Task, metric: str | None, primary: str | None, target: float | None) -> Findings:
    done = [run for setting in task.settings for run in setting.done.values()]
    evaluated = bool(done) and all(EVALUATED in run.summary for run in done)
    final = primary == EVALUATION or (primary is None and metric is not None)
    score = metric or (EVALUATED if evaluated or final else TRAINED)
    curved = bool(done) and all(len(run.curve(score)[0]) >= FEWEST_EVALUATIONS for run in done)
    curve = score if curved else TRAINED
    if target is None and score in (EVALUATED, TRAINED):
        target = known_target(task.env)
    results = _results(task, lambda run: run.summary.get(score), target)
    _add_curves(results, curve)
    _add_profiles(results)
    throughout = None
    if done:
        share, about = (0.1, " of the last tenth") if primary == LAST_TENTH else (1.0, "")
        means = _results(task, lambda run: mean_return(run, share), None)
        throughout = Findings(
            task, f"mean {TRAINED}{about}", TRAINED, None, means, lacking="no episode ended"
        )
    lacking = f"no finite {score} in summary.json"
    found = Findings(task, score, curve, target, results, lacking, throughout=throughout)
    (found if final or throughout is None else throughout).is_primary = True
    return found


def _results(
    task: Task, score: Callable[[Run], float | None], target: float | None
) -> list[Result]:
    """Each setting with its scores and their estimates."""
    measures = dict(MEASURES)
    if target is not None:
        measures["gap"] = optimality_gap(target)
    found = []
    for setting in task.settings:
        known = {seed: score(run) for seed, run in setting.done.items()}
        result = Result(setting, {s: value for s, value in known.items() if value is not None}, {})
        if result.scores:
            values = [_values(result)]
            result.estimates = {name: estimate(values, how) for name, how in measures.items()}
        found.append(result)
    return found


def _values(result: Result) -> np.ndarray:
    return np.array(list(result.scores.values()))


def mean_return(run: Run, share: float = 1.0) -> float | None:
    """The mean return of a run's last `share` of frames; None if no episode ended in the run.

    A record's `episode/return` is that of the episodes that ended since the record before it, and
    counts for the frames between the two. Frames without a record of their own count with the next
    one, since their episodes ended later, and those after the last one with that.
    """
    ends, values = run.curve(TRAINED)
    total = run.steps[-1] if len(run.steps) else 0.0
    if not len(ends) or not total:
        return None
    edges = np.clip([0.0, *ends[:-1], total], (1.0 - share) * total, total)
    return float(np.average(values, weights=np.diff(edges)))


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.median(known)) if known else math.nan


def _phase_share(run: Run, phase: str) -> float:
    """Seconds in a phase for each 1000 frames; of a resumed run, since it was resumed."""
    wall, fps = run.summary.get("wall_s", math.nan), run.summary.get("fps", math.nan)
    phases = {name: run.summary.get(f"time/{name}_s", math.nan) for name in PHASES}
    spent = wall - sum(phases.values()) if phase == "other" else phases[phase]
    frames = wall * fps
    return max(spent, 0.0) / frames * 1000 if frames > 0 and math.isfinite(spent) else math.nan


# -- curves


def _add_curves(results: Sequence[Result], metric: str) -> None:
    """All on one grid, so that the figures can be compared point by point."""
    for axis in ("frames", "seconds", "virtual seconds"):
        lines = [
            [line for run in result.runs if len((line := run.curve(metric, axis))[0])]
            for result in results
        ]
        grid = np.linspace(0, max((x[-1] for group in lines for x, _ in group), default=0), POINTS)
        for result, group in zip(results, lines, strict=True):
            curves = [
                interpolate(x, trailing_mean(x, y, SMOOTHING * (x[-1] - x[0])), grid)
                for x, y in group
            ]
            if curves:
                result.curves[axis] = band(curves, grid)


def _add_profiles(results: Sequence[Result]) -> None:
    scores = [value for result in results for value in result.scores.values()]
    if not scores:
        return
    room = 0.05 * (max(scores) - min(scores) or 1.0)
    thresholds = np.linspace(min(scores) - room, max(scores) + room, POINTS)
    for result in results:
        if result.scores:
            result.profile = profile([_values(result)], thresholds)


# -- comparisons


def _pairs(
    findings: Findings, baseline: str | None, by_source: bool
) -> list[tuple[str, str]] | None:
    """Each setting and the one that it is compared with; None if there is no such baseline."""
    settings, design = findings.task.settings, findings.design
    fixed: Options = {}
    if by_source:
        fixed = {SOURCE: settings[0].values.get(SOURCE, MISSING)}
    elif baseline is not None:
        fixed = _values_named(baseline, settings)
    elif design is not None:
        fixed = design.first(settings)
    same = [setting for setting in settings if _has(setting, fixed)]
    if fixed and (by_source or len(same) != 1):
        values = " and ".join(f"{key}={value}" for key, value in fixed.items())
        findings.against = f"the setting with {values} that is otherwise the same"
        factors = design.factors if design else ()
        return _otherwise_same(settings, fixed, factors) if same else None
    label = same[0].label if fixed else _baseline(findings, baseline)
    if label is None:
        return None
    findings.baseline, findings.against = label, label
    return [(result.label, label) for result in findings.results if result.label != label]


def _compare(findings: Findings, pairs: Sequence[tuple[str, str]]) -> None:
    scores = {r.label: r.scores for r in findings.results}
    findings.comparisons = compare_pairs(scores, pairs, findings.margin)
    for name, baseline in pairs:
        left, right = (_values(findings.result(label)) for label in (name, baseline))
        if len(left) and len(right):
            findings.improvements[name] = probability_of_improvement([left], [right])


def _otherwise_same(
    settings: Sequence[Setting], fixed: Options, factors: Factor
) -> list[tuple[str, str]]:
    """Each setting with the one that has the fixed values and the same of all other factors."""

    def rest(setting: Setting) -> tuple[str, ...]:
        keys = factors or setting.values
        return tuple(setting.options.get(key, MISSING) for key in keys if key not in fixed)

    bases = {rest(setting): setting.label for setting in settings if _has(setting, fixed)}
    pairs = [(setting.label, bases.get(rest(setting), setting.label)) for setting in settings]
    return [(name, baseline) for name, baseline in pairs if name != baseline]


def _has(setting: Setting, values: Options) -> bool:
    return all(setting.options.get(key, MISSING) == value for key, value in values.items())


def _values_named(baseline: str, settings: Sequence[Setting]) -> Options:
    """The options in `option=value+option=value`; none if it is the name of a setting."""
    if any(baseline == setting.label for setting in settings):
        return {}
    found = {}
    for part in baseline.split("+"):
        name, sign, value = part.partition("=")
        keys = [k for k in settings[0].values if name in (k, k.rsplit(".", 1)[-1])]
        if not sign or len(keys) != 1:
            return {}
        found[keys[0]] = value
    return found


def _baseline(findings: Findings, wanted: str | None) -> str | None:
    """The setting of that name, or whose name alone holds it; else the first with most seeds.

    Finished ones, with a score or without: a run without a score does not move the baseline.
    """
    if wanted is None:
        scored = [result for result in findings.results if result.scores]
        most = max(scored, key=lambda result: len(result.runs), default=None)
        return most.label if most else None
    labels = [result.label for result in findings.results]
    if wanted in labels:
        return wanted
    holding = [label for label in labels if wanted in label]
    if len(holding) > 1:
        raise ValueError(f"--baseline {wanted!r} may be {', '.join(holding)}: name one of them")
    return holding[0] if holding else None
