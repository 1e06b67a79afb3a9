"""The report of branches: what the change did, by moment.

The score of a branch is that of its last evaluation. Branches of one repeat share their random
streams, so both arms are compared pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from harness.branch.moments import frames_at
from harness.files import read_json
from harness.numbers import plural
from harness.report import drawing
from harness.report.pages import Block, Document, Picture, Table
from harness.report.runs import Run, read_run
from harness.report.statistics import (
    LEVEL,
    NUM_RESAMPLES,
    Estimate,
    draw_places,
    holm,
    paired_test,
    student,
)
from harness.report.text import NONE, number, with_interval
from harness.run.branch_start import START

CONTROL = "control"
GREEDY, SAMPLED, ACTING = "eval/return", "eval/return_sampled", "episode/return"
WORDS = {
    GREEDY: "return of the newest weights, greedy",
    SAMPLED: "return of the newest weights, sampled",
    ACTING: "return of the acting weights, last 100 episodes",
}
SIGNIFICANT = 1 - LEVEL
HALF_LEVEL = 0.90  # of the interval of the moment at which half of the effect is lost


@dataclass(frozen=True)
class Result:
    """One branch that is done."""

    update: int
    frames: int  # of the parent at the moment
    arm: str
    repeat: int
    run: Run

    def score(self, metric: str) -> float:
        """At the end."""
        value = self.run.summary.get(metric)
        return float(value) if isinstance(value, int | float) else math.nan


@dataclass(frozen=True)
class Difference:
    """One arm against the control, from one moment on."""

    arm: str
    update: int
    frames: int
    pairs: np.ndarray  # [2, repeats]: scores of the arm and of the control
    difference: Estimate
    p: float
    p_corrected: float = math.nan

    @property
    def sign(self) -> int:
        """1 or -1 if the arm scores significantly higher or lower, else 0."""
        if not self.p_corrected <= SIGNIFICANT:
            return 0
        return 1 if self.difference.value > 0 else -1


@dataclass(frozen=True)
class Results:
    """All branches of a directory, and their parent."""

    parent: Run
    done: Sequence[Result]
    failed: int

    @property
    def metrics(self) -> list[str]:
        """The scores that all branches have, the most important one first."""
        metrics = [GREEDY, SAMPLED] if self._has(GREEDY) else [ACTING]
        return [metric for metric in metrics if self._has(metric)]

    def _has(self, metric: str) -> bool:
        return all(math.isfinite(one.score(metric)) for one in self.done)

    @property
    def arms(self) -> list[str]:
        """Without the control."""
        return [arm for arm in dict.fromkeys(one.arm for one in self.done) if arm != CONTROL]

    def of(self, update: int, arm: str) -> list[Result]:
        """The branches of one arm from one moment."""
        return [one for one in self.done if (one.update, one.arm) == (update, arm)]

    def differences(self, metric: str) -> list[Difference]:
        """Each arm against the control at each moment; p values are corrected together."""
        moments = sorted({(one.update, one.frames) for one in self.done})
        tests = [self._difference(metric, arm, *moment) for arm in self.arms for moment in moments]
        tests = [test for test in tests if test.pairs.shape[1]]
        corrected = holm([test.p for test in tests])
        return [
            Difference(t.arm, t.update, t.frames, t.pairs, t.difference, t.p, p)
            for t, p in zip(tests, corrected, strict=True)
        ]

    def _difference(self, metric: str, arm: str, update: int, frames: int) -> Difference:
        scores = [
            {one.repeat: one.score(metric) for one in self.of(update, name)}
            for name in (arm, CONTROL)
        ]
        repeats = sorted(scores[0].keys() & scores[1].keys())
        pairs = np.array([[score[repeat] for repeat in repeats] for score in scores])
        return Difference(arm, update, frames, pairs, *paired_test(*pairs))


def read_results(parent: Path, places: Sequence[Path]) -> Results:
    """The branches in these run directories."""
    metrics = (*WORDS, "policy/version")
    done, failed = [], 0
    for place in places:
        if read_json(place / "status.json").get("state") != "done":
            failed += 1
            continue
        origin = read_json(place / "manifest.json")["branch"]
        run = read_run(place, metrics, name=place.name, source="")
        update, arm, repeat = (origin[name] for name in ("update", "arm", "repeat"))
        done.append(Result(update, frames_at(place / START), arm, repeat, run))
    return Results(read_run(parent, metrics, name=parent.name, source=""), done, failed)


# -- in words


def brief(results: Results) -> list[Block]:
    """The tables and the answers, for a terminal."""
    blocks: list[Block] = []
    for metric in results.metrics:
        differences = results.differences(metric)
        if differences:
            blocks += [f"Score: {WORDS[metric]}, at the end of the run.", table(differences)]
            blocks.append(list(sentences(differences)))
    return blocks


def table(differences: Sequence[Difference]) -> Table:
    """Both arms and their difference, by moment."""
    columns = ["change", "from update", "changed", "control", "difference", "p", "pairs"]
    rows = []
    for one in differences:
        changed, control = (student(scores) for scores in one.pairs)
        rows.append(
            [
                one.arm,
                str(one.update),
                number(changed.value),
                number(control.value),
                with_interval(*one.difference[:3]),
                NONE if math.isnan(one.p_corrected) else f"{one.p_corrected:.2g}",
                str(one.difference.seeds),
            ]
        )
    return Table(columns, rows, numbers=True)


def sentences(differences: Sequence[Difference]) -> Iterator[str]:
    """What the differences of each arm show, and no more than that."""
    for arm in dict.fromkeys(one.arm for one in differences):
        those = [one for one in differences if one.arm == arm]
        for sign, word in ((1, "higher"), (-1, "lower")):
            updates = [str(one.update) for one in those if one.sign == sign]
            if updates:
                after = plural(len(updates), "update", "updates")
                yield f"{arm} scores {word} than the control after {after} {', '.join(updates)}."
        none = [str(one.update) for one in those if one.sign == 0]
        if none:
            after = plural(len(none), "update", "updates")
            yield f"{arm}: no difference found after {after} {', '.join(none)}."
        if (half := half_lost(those)) is not None:
            yield (
                f"{arm}: the effect is half of its largest at update {half.value:.0f}, "
                f"{100 * HALF_LEVEL:.0f} % interval {half.low:.0f} to {half.high:.0f}. Between "
                "moments it is interpolated."
            )


def where_it_changes(results: Results) -> tuple[int, int] | None:
    """The two neighbouring moments, furthest apart, between which an answer changes.

    So it does where a difference becomes significant or no longer is, and where half of the largest
    one is lost. None if no answer changes, or if there is no update between them.
    """
    differences = results.differences(results.metrics[0])
    gaps = []
    for arm in results.arms:
        those = sorted((one for one in differences if one.arm == arm), key=lambda d: d.update)
        half = half_lost(those)
        gaps += [
            (a.update, b.update)
            for a, b in pairwise(those)
            if a.sign != b.sign or (half is not None and a.update <= half.value < b.update)
        ]
    widest = max(gaps, key=lambda gap: gap[1] - gap[0], default=None)
    return widest if widest is not None and widest[1] - widest[0] > 1 else None


def half_lost(differences: Sequence[Difference]) -> Estimate | None:
    """The update at which the mean difference has fallen to half of its largest one.

    The interval is of a bootstrap over repeats. None unless the largest difference is significant
    and later moments have less than half of it.
    """
    counts = {one.pairs.shape[1] for one in differences}
    if len(differences) < 2 or len(counts) > 1 or min(counts) < 2:
        return None
    ordered = sorted(differences, key=lambda one: one.update)
    updates = np.array([one.update for one in ordered], float)
    by_repeat = np.array([one.pairs[0] - one.pairs[1] for one in ordered])  # [moments, repeats]
    largest = ordered[int(np.argmax(np.abs(by_repeat.mean(axis=1))))]
    if largest.sign == 0:
        return None
    by_repeat = by_repeat * largest.sign
    value = _half(updates, by_repeat.mean(axis=1))
    if math.isnan(value):
        return None
    places = draw_places(by_repeat.shape[1], NUM_RESAMPLES, 0)
    resampled = np.array([_half(updates, means) for means in by_repeat[:, places].mean(axis=2).T])
    resampled = np.nan_to_num(resampled, nan=updates[-1])  # not lost before the last moment
    tail = (1 - HALF_LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(value, float(low), float(high), by_repeat.shape[1])


def _half(updates: np.ndarray, means: np.ndarray) -> float:
    """Where the means have fallen to half of the largest, for good; NaN if they have not."""
    top = int(np.argmax(means))
    half = means[top] / 2
    above = np.flatnonzero(means > half)
    if len(above) == 0 or above[-1] == len(means) - 1:
        return math.nan
    i = int(above[-1])
    share = (means[i] - half) / (means[i] - means[i + 1])
    return float(updates[i] + share * (updates[i + 1] - updates[i]))


# -- the page


def document(results: Results, title: str) -> Document:
    """The page: tables, answers and figures."""
    repeats = max((one.repeat for one in results.done), default=0)
    intro = (
        "Each branch goes on from the parent's state after some update, with new random streams. "
        "The control has the parent's options. Branches of one repeat share their streams and form "
        f"a pair; there are {repeats} repeats. Intervals of differences are Student's, at 95 %; p "
        "values are corrected by Holm's method over all rows of a table."
    )
    blocks: list[Block] = [intro]
    if results.failed:
        blocks.append(f"{results.failed} branches are not done, and are left out.")
    sections: dict[str, list[Block]] = {"Branches": [*blocks, *brief(results)]}
    pictures = [
        drawing.draw(
            partial(effects, results, metric),
            f"difference-{slug}",
            f"The difference to the control, by the update at which the branches begin: "
            f"{WORDS[metric]}, at the end of the run. Bars are 95 % intervals.",
        )
        for slug, metric in zip(("main", "second"), results.metrics, strict=False)
    ]
    pictures += [
        drawing.draw(
            partial(fans, results, update),
            f"fans-{update}",
            f"From update {update} on: the parent, and means of the arms with 95 % intervals.",
        )
        for update in sorted({one.update for one in results.done})
    ]
    drawn: list[Block] = [one for one in pictures if isinstance(one, Picture)]
    if drawn:
        sections["Figures"] = drawn
    return Document(title, sections)


def effects(results: Results, metric: str) -> Figure | None:
    """The differences over the moments, a line for each arm."""
    differences = results.differences(metric)
    if not differences:
        return None
    looks = _looks(results)
    key = [(arm, looks[arm]) for arm in results.arms]
    figure, (axes,) = drawing.panels(
        [""], 3.0, "update at which the branches begin", "difference in return", key
    )
    axes.axhline(0, color="#999999", linewidth=0.8, linestyle="--", zorder=1)
    for arm in results.arms:
        those = sorted((one for one in differences if one.arm == arm), key=lambda d: d.update)
        bars = [
            [one.difference.value - one.difference.low for one in those],
            [one.difference.high - one.difference.value for one in those],
        ]
        axes.errorbar(
            [one.update for one in those],
            [one.difference.value for one in those],
            yerr=np.nan_to_num(bars),
            capsize=2,
            elinewidth=1.1,
            **looks[arm],
        )
    return figure


def fans(results: Results, update: int) -> Figure | None:
    """The parent's curve, and those of the branches of one moment."""
    metric = results.metrics[0]
    looks = _looks(results)
    here = [one for one in results.done if one.update == update]
    names = [name for name in (CONTROL, *results.arms) if any(one.arm == name for one in here)]
    key = [("parent", _PARENT), *((name, looks[name] | {"marker": ""}) for name in names)]
    figure, (axes,) = drawing.panels([""], 3.0, "frames", WORDS[metric], key)
    axes.plot(*_curve(results.parent, metric), **_PARENT)
    axes.axvline(here[0].frames, color="#999999", linewidth=0.8, linestyle="--", zorder=1)
    for name in names:
        curves = [_curve(one.run, metric) for one in here if one.arm == name]
        steps = sorted(set.intersection(*(set(x) for x, _ in curves)))
        if not steps:
            continue
        rows = np.array([[y[list(x).index(step)] for step in steps] for x, y in curves])
        means = [student(column) for column in rows.T]
        band = pd.DataFrame(means).assign(x=steps)
        drawing.draw_band(axes, band, looks[name] | {"marker": "o", "markersize": 3})
    axes.xaxis.set_major_formatter(FuncFormatter(drawing.short))
    return figure


_PARENT: dict[str, Any] = {"color": "#777777", "linewidth": 1.2}


def _looks(results: Results) -> Mapping[str, dict[str, Any]]:
    return {name: drawing.line_look(i) for i, name in enumerate((CONTROL, *results.arms))}


def _curve(run: Run, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Frames and values of the records that have the metric, the last one of each frame."""
    rows = run.records[["step", metric]].dropna().drop_duplicates("step", keep="last")
    return rows["step"].to_numpy(), rows[metric].to_numpy()
