"""Every number of a report, computed from the runs; nothing here draws or writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from gymnasium.envs.registration import registry

from harness.analysis.statistics import (
    MEASURES,
    Band,
    Comparison,
    Estimate,
    Profile,
    band,
    compare_pairs,
    estimate,
    interpolate,
    mean,
    optimality_gap,
    probability_of_improvement,
    profile,
    trailing_mean,
)
from harness.metrics import PHASES
from harness.options.errors import suggest
from harness.report.read import Run
from harness.report.settings import SOURCE, Plan, Setting, Task

EVALUATED, TRAINED = "eval/return", "episode/return"
LATENCIES = ("publish", "ack", "apply")
LAGS = ("policy/lag_mean", "policy/lag_p95", "policy/lag_max")
WANTED = (
    "time",
    EVALUATED,
    TRAINED,
    *(f"sync/{name}_ms" for name in LATENCIES),
    *LAGS,
    *(f"time/{phase}_s" for phase in PHASES),
)  # of a run's records
POINTS = 101  # of a curve's grid, of a profile and of a distribution
SMOOTHING = 0.05  # of a run's length: what a point of a curve looks back on
FEWEST_POINTS = 10  # of a metric that is worth a curve


@dataclass
class Result:
    """One setting's numbers."""

    setting: Setting
    scores: dict[int, float]  # by seed
    estimates: dict[str, Estimate]  # by measure; empty without scores
    by_frames: Band | None = None
    by_seconds: Band | None = None
    profile: Profile | None = None
    latencies: dict[str, np.ndarray] = field(default_factory=dict)  # quantiles of record means
    lags: np.ndarray | None = None  # likewise

    @property
    def label(self) -> str:
        return self.setting.label

    def each(self, name: str) -> np.ndarray:
        """What each finished run's summary says, as far as it does."""
        found = [run.summary.get(name, math.nan) for run in self.setting.done.values()]
        return np.array([value for value in found if math.isfinite(value)])

    def middle(self, name: str) -> float:
        """The median over seeds of what the summaries say; NaN if none does."""
        found = self.each(name)
        return float(np.median(found)) if len(found) else math.nan

    def seconds_per_1000_frames(self, phase: str) -> float:
        """Of the learner's loop, the median over seeds; `other` is what no phase accounts for."""
        found = [_phase_share(run, phase) for run in self.setting.done.values()]
        known = [value for value in found if math.isfinite(value)]
        return float(np.median(known)) if known else math.nan


@dataclass
class Findings:
    """One task's numbers."""

    task: Task
    score: str  # the metric that is compared
    curve: str  # the metric whose course is shown
    target: float | None
    results: list[Result]
    baseline: str | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    improvements: dict[str, Estimate] = field(default_factory=dict)  # by setting
    throughout: Findings | None = None  # the same of the curve's mean: who learned sooner

    def result(self, label: str) -> Result:
        return next(result for result in self.results if result.label == label)


def analyse(
    plan: Plan,
    *,
    metric: str | None,
    baseline: str | None,
    target: float | None,
    by_source: bool,
    progress: Callable[[str], None],
) -> list[Findings]:
    """The numbers of every task."""
    found = []
    for task in plan.tasks:
        progress(f"statistics of {task.name}")
        found.append(_task(task, metric, target))
    _check_metric(metric, found)
    _choose_pairs(found, baseline, by_source)
    _choose_pairs([f.throughout for f in found if f.throughout], baseline, by_source)
    return found


def _check_metric(metric: str | None, found: Sequence[Findings]) -> None:
    """Raise if finished runs have numbers, and none of this name."""
    results = [result for findings in found for result in findings.results]
    known = {name for r in results for run in r.setting.done.values() for name in run.summary}
    if metric is not None and known and metric not in known:
        raise ValueError(f"--metric is {metric!r}; {suggest(metric, known)}")


def _task(task: Task, metric: str | None, target: float | None) -> Findings:
    done = [run for setting in task.settings for run in setting.done.values()]
    evaluated = bool(done) and all(EVALUATED in run.summary for run in done)
    score = metric or (EVALUATED if evaluated else TRAINED)
    curved = bool(done) and all(len(run.curve(score)[0]) >= FEWEST_POINTS for run in done)
    curve = score if curved else TRAINED
    if target is None and score in (EVALUATED, TRAINED):
        target = known_target(task.env)
    results = [
        _result(setting, lambda run: run.summary.get(score), target) for setting in task.settings
    ]
    _add_curves(results, curve)
    _add_profiles(results)
    throughout = None
    if any(result.by_frames for result in results):
        means = [
            _result(setting, lambda run: _height(run, curve), None) for setting in task.settings
        ]
        throughout = Findings(task, f"mean {curve}", curve, None, means)
    return Findings(task, score, curve, target, results, throughout=throughout)


def _height(run: Run, metric: str) -> float | None:
    """The mean of a curve over its frames: the area below it, divided by its length."""
    known, values = run.curve(metric)
    if len(known) < FEWEST_POINTS:
        return None
    x = run.steps[known]
    return float(np.trapezoid(values, x) / (x[-1] - x[0])) if x[-1] > x[0] else None


def known_target(env: str) -> float | None:
    """The return at which gymnasium calls an environment solved, if it says."""
    spec = registry.get(env)
    return None if spec is None else spec.reward_threshold


def _result(setting: Setting, score: Callable[[Run], float | None], target: float | None) -> Result:
    told = {seed: score(run) for seed, run in sorted(setting.done.items())}
    scores = {seed: value for seed, value in told.items() if value is not None}
    estimates = {}
    if scores:
        measures = dict(MEASURES)
        if target is not None:
            measures["gap"] = optimality_gap(target)
        values = np.array(list(scores.values()))
        estimates = {name: estimate([values], measure) for name, measure in measures.items()}
    runs = list(setting.done.values())
    latencies = {name: _quantiles(runs, f"sync/{name}_ms") for name in LATENCIES}
    return Result(
        setting,
        scores,
        estimates,
        latencies={name: found for name, found in latencies.items() if found is not None},
        lags=_quantiles(runs, "policy/lag_mean"),
    )


def _quantiles(runs: Iterable[Run], metric: str) -> np.ndarray | None:
    """Percentiles 0 to 100 of the records of all runs together."""
    values = [run.curve(metric)[1] for run in runs]
    pooled = np.concatenate(values) if values else np.zeros(0)
    return np.percentile(pooled, np.linspace(0, 100, POINTS)) if len(pooled) else None


def _add_curves(results: Sequence[Result], metric: str) -> None:
    """On one grid for all, so that the figures can be read across."""
    runs = {result.label: list(result.setting.done.values()) for result in results}
    for axis in ("frames", "seconds"):
        lines = {
            label: [line for run in group if (line := _line(run, metric, axis)) is not None]
            for label, group in runs.items()
        }
        ends = [x[-1] for group in lines.values() for x, _ in group]
        if not ends:
            continue
        grid = np.linspace(0, max(ends), POINTS)
        for result in results:
            if group := lines[result.label]:
                curves = [interpolate(x, y, grid) for x, y in group]
                setattr(result, f"by_{axis}", band(curves, grid, mean))


def _line(run: Run, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray] | None:
    known, values = run.curve(metric)
    if not len(known):
        return None
    x = (run.steps if axis == "frames" else run.seconds())[known]
    finite = np.isfinite(x)
    x, values = x[finite], values[finite]
    if not len(x):
        return None
    return x, trailing_mean(x, values, SMOOTHING * (x[-1] - x[0]))


def _add_profiles(results: Sequence[Result]) -> None:
    scores = [value for result in results for value in result.scores.values()]
    if not scores:
        return
    room = 0.05 * (max(scores) - min(scores) or 1.0)
    thresholds = np.linspace(min(scores) - room, max(scores) + room, POINTS)
    for result in results:
        if result.scores:
            result.profile = profile([np.array(list(result.scores.values()))], thresholds)


def _choose_pairs(found: Sequence[Findings], baseline: str | None, by_source: bool) -> None:
    """Who is compared with whom: every setting with the baseline, or sweep with sweep."""
    matched = baseline is None
    for findings in found:
        if by_source:
            _compare(findings, _across_sources(findings.task.settings))
        elif (label := _baseline(findings, baseline)) is not None:
            matched = True
            findings.baseline = label
            others = [result.label for result in findings.results if result.label != label]
            _compare(findings, [(other, label) for other in others])
    if not matched:
        labels = [result.label for findings in found for result in findings.results]
        raise ValueError(f"--baseline is {baseline!r}; {suggest(str(baseline), labels)}")


def _across_sources(settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Each setting with the same one of the sweep that was named first."""
    firsts: dict[tuple[str, ...], str] = {}
    pairs = []
    for setting in settings:
        rest = tuple(value for key, value in setting.values.items() if key != SOURCE)
        first = firsts.setdefault(rest, setting.label)
        if first != setting.label:
            pairs.append((setting.label, first))
    return pairs


def _baseline(findings: Findings, wanted: str | None) -> str | None:
    """The setting of that name, or the only one whose name holds it; by default the best known."""
    scored = [result for result in findings.results if result.scores]
    if wanted is None:
        most = max((len(result.scores) for result in scored), default=0)
        return next((result.label for result in scored if len(result.scores) == most), None)
    labels = [result.label for result in findings.results]
    if wanted in labels:
        return wanted
    holding = [label for label in labels if wanted in label]
    if len(holding) > 1:
        raise ValueError(f"--baseline {wanted!r} may be {', '.join(holding)}: name one of them")
    return holding[0] if holding else None


def _compare(findings: Findings, pairs: Sequence[tuple[str, str]]) -> None:
    scores = {result.label: result.scores for result in findings.results}
    findings.comparisons = compare_pairs(scores, pairs)
    for name, baseline in pairs:
        left, right = (np.array(list(scores[label].values())) for label in (name, baseline))
        if len(left) and len(right):
            findings.improvements[name] = probability_of_improvement([left], [right])


def _phase_share(run: Run, phase: str) -> float:
    """Seconds in a phase for each 1000 frames. A resumed run counts from where it went on."""
    wall, fps = run.summary.get("wall_s", math.nan), run.summary.get("fps", math.nan)
    phases = {name: run.summary.get(f"time/{name}_s", math.nan) for name in PHASES}
    spent = wall - sum(phases.values()) if phase == "other" else phases[phase]
    frames = wall * fps
    return max(spent, 0.0) / frames * 1000 if frames > 0 and math.isfinite(spent) else math.nan
