"""How a report opens: the verdict in one sentence, the figure that shows it, and its table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from harness.numbers import Unused, count, plural
from harness.report import drawing, figures
from harness.report.comparisons import (
    EQUIVALENT,
    IDENTICAL,
    POWER,
    UNDECIDED,
    VERDICTS,
    WITHIN,
    Margin,
    is_told_apart,
    pairs_needed,
)
from harness.report.design import Design
from harness.report.pages import Block, Table
from harness.report.scores import TRAINED, Report, Score, summaries
from harness.report.statistics import LEVEL, caution, student
from harness.report.text import NONE, joined, number, signed, with_interval

SIGNS = dict(zip(VERDICTS, ("▼", "≈▼", "≈", "=", "≈▲", "▲", "?"), strict=True))


def open_with(report: Report, cells: pd.DataFrame) -> Iterator[Block | None]:
    """The blocks of the first section, about the primary score of each task."""
    scores, design = report.primary, report.design
    yield sentence(report)
    if left_out := [*_unscored(scores), *report.plan.notes]:
        yield left_out
    if not any(score.scored for score in scores):
        return
    if design is None:
        yield drawing.draw(
            lambda: figures.scores(report),
            "scores",
            f"{_metrics(scores)}: a dot for each seed; below them the mean and its 95 % interval.",
        )
    else:
        has_band = any(score.baseline for score in scores)
        band = " The grey band is the margin about the baseline." if has_band else ""
        yield drawing.draw(
            lambda: figures.response(report, cells),
            "response",
            f"{_metrics(scores)}: means over seeds with Student's 95 % intervals.{band}",
        )
        yield from _tables(design, cells)
    yield from _definition(scores)
    yield from _interactions(scores)
    yield [*_verdicts(report), *_opposite(report), *_seeds_needed(report), *_unused(report)]
    yield from _delays(report)
    yield from _cautions(scores)


def sentence(report: Report) -> str:
    """What the comparisons of all tasks show."""
    scores = report.primary
    compared = [score for score in scores if len(score.comparisons)]
    if not any(score.scored for score in scores):
        return _without_scores(report)
    if not compared:
        return _without_comparisons(scores)
    comparisons = pd.concat([score.comparisons for score in compared])
    if len(comparisons) == 1:
        return f"By {_metrics(scores)}: {comparisons['finding'].iloc[0]}"
    against = joined(dict.fromkeys(score.against for score in compared))
    text = (
        f"By {_metrics(scores)}, of {count(len(comparisons), 'setting')} compared with {against}, "
        f"{joined(_counts(comparisons, report.margin))}"
    )
    if not any(map(is_told_apart, comparisons.itertuples())):
        return f"{text}."
    return f"{text}; the largest difference is {_largest_difference(report)}."


def _without_scores(report: Report) -> str:
    runs = report.plan.runs
    if ((runs["state"] == "done") & (runs["task"] != "")).any():
        metrics = _metrics(report.primary)
        return f"No finished run has a score ({metrics}): there is nothing to compare."
    return "No run has finished, so there is nothing to compare. See Failures and damage, below."


def _without_comparisons(scores: Sequence[Score]) -> str:
    """The score of each task, if it has one setting."""
    if any(len(score.scored) > 1 for score in scores):
        return "There is nothing to compare: no setting shares a finished seed with another."
    means = []
    for score in scores:
        for setting in score.scored:
            mean = student(score.of(setting))
            value = with_interval(mean.value, mean.low, mean.high)
            means.append(f"{value} on {score.task} ({count(mean.seeds, 'seed')})")
    return f"The {_metrics(scores)} is {joined(means)}; there is nothing to compare it with."


def _counts(comparisons: pd.DataFrame, margin: Margin) -> Iterator[str]:
    """How many settings have which verdict."""
    verdicts = Counter(comparisons["verdict"])
    equal, same, undecided = (verdicts[v] for v in (EQUIVALENT, IDENTICAL, UNDECIDED))
    if differ := verdicts.total() - equal - same - undecided:
        small = sum(n for verdict, n in verdicts.items() if verdict.endswith(WITHIN))
        inside = f" ({small} by less than the margin)" if small else ""
        yield f"{differ} {plural(differ, 'differs', 'differ')}{inside}"
    if equal:
        yield f"{equal} {plural(equal, 'is', 'are')} equivalent within {margin}"
    if same:
        yield f"{same} {plural(same, 'is', 'are')} identical to it in every pair"
    if undecided:
        yield f"{undecided} cannot be told from it"


def _largest_difference(report: Report) -> str:
    """Of those that are told apart, as shares of the baseline's mean."""
    sure = [
        (score, comparison, _relative(score, comparison))
        for score in report.primary
        for comparison in score.comparisons.itertuples()
        if is_told_apart(comparison)
    ]
    score, largest, share = max(sure, key=lambda each: abs(each[2]))
    size = f" ({100 * share:+.0f} %)" if math.isfinite(share) else ""
    where = f" on {score.task}" if len(report.primary) > 1 else ""
    name = _name(report.design, score, largest.setting)
    return f"{number(largest.difference)}{size}: {name}{where}"


def _relative(score: Score, comparison: Any) -> float:
    """The difference as a share of the baseline's mean."""
    scores = score.of(comparison.baseline)
    mean = abs(float(scores.mean())) if len(scores) else 0.0
    return comparison.difference / mean if mean else math.nan


def _name(design: Design | None, score: Score, setting: str) -> str:
    """What the figure calls a setting."""
    if design is None:
        return setting
    place = design.places.loc[(score.task, setting)]
    return " · ".join(filter(None, (place.line, f"{' + '.join(design.x)}={place.x}")))


def _definition(scores: Sequence[Score]) -> Iterator[Block]:
    """What the score is, where its name does not say it."""
    if any(score.metric.startswith(f"mean {TRAINED}") for score in scores):
        yield (
            f"Mean {TRAINED} is the mean return over the frames of a run, from its first to its "
            "last. A frame counts with the mean return of the episodes that ended in its record "
            "or, where none did, in the next record with ended episodes. Frames after the last "
            "such record count with its value."
        )


def _unscored(scores: Sequence[Score]) -> Iterator[str]:
    """The finished runs that are in no number of the verdict, and why."""
    for score in scores:
        if score.unscored:
            are = plural(len(score.unscored), "is", "are")
            yield f"Left out: {joined(score.unscored)} {are} finished, but {score.lacking}"


def _opposite(report: Report) -> Iterator[str]:
    """Differences of training whose order is the other one at the end, if one is shown or large."""
    for training in report.primary:
        final = report.final(training.task)
        if final is training:
            continue
        pairs = final.comparisons.merge(training.comparisons, on=["setting", "baseline"])
        for row in pairs.itertuples():
            end_is_sure = row.p_corrected_x < 1 - LEVEL
            is_large = abs(row.difference_x) > row.margin_x
            if not (end_is_sure or row.p_corrected_y < 1 - LEVEL or is_large):
                continue
            if row.difference_x * row.difference_y < 0:
                sure = "" if end_is_sure else ", which could be chance"
                word = "higher" if row.difference_x > 0 else "lower"
                yield (
                    f"At the end of the runs the order is the opposite: by {final.metric}, "
                    f"{row.setting} is {number(abs(row.difference_x))} {word} than "
                    f"{row.baseline} (corrected p = {number(row.p_corrected_x, 2)}){sure}."
                )


def _delays(report: Report) -> Iterator[Block]:
    """How much of the differences that are shown is old weights showing later what was learned."""
    items = []
    for score in report.primary:
        for row in score.comparisons.itertuples():
            if is_told_apart(row) and row.setting in score.delays:
                name = _name(report.design, score, row.setting)
                delay = signed(score.delays[row.setting])
                items.append(f"{name}: {delay} of {signed(row.difference)}")
    if items:
        yield (
            "The score is the return of the weights that act. Where they are older than the "
            "baseline's, it shows later what was learned. So much of the differences is this "
            "delay, by the baseline's curves moved by the difference in mean lag:"
        )
        yield items


def _seeds_needed(report: Report) -> Iterator[str]:
    """How many seeds would decide what these could not."""
    for score in report.primary:
        tests = len(score.comparisons)
        undecided = score.comparisons[score.comparisons["verdict"] == UNDECIDED]
        counts = [pairs_needed(row, row.pairs, tests) for row in undecided.itertuples()]
        if needed := sorted(n for n in counts if n is not None):
            task = f" on {score.task}" if len(report.primary) > 1 else ""
            least, most = needed[0], needed[-1]
            seeds = f"{least}" if least == most else f"{least} to {most}"
            yield (
                f"To tell a difference of {report.margin}{task} from chance, you need about "
                f"{seeds} seeds, judged by the variance of these pairs (power {POWER:.0%})."
            )


def _unused(report: Report) -> Iterator[str]:
    """Which frames were not learned from, and how many updates there were."""
    for task in report.plan.tasks:
        runs = report.plan.counted(task)
        numbers = summaries(runs)
        if "updates" not in numbers:
            continue
        numbers = numbers[numbers["updates"].notna()].fillna(0.0)
        little = 0
        for setting, inside in numbers.groupby(runs["setting"], sort=False):
            unused = [Unused.of(summary) for summary in inside.to_dict("records")]
            worst = max(unused, key=lambda one: one.share)
            little += bool(worst.count) and not worst.is_much
            if worst.is_much:
                updates = joined(dict.fromkeys(map(number, inside["updates"])))
                yield (
                    f"Warning: {setting} did not learn from {worst} of the frames of a run; "
                    f"its runs made {updates} updates."
                )
        if little:
            yield (
                f"{task}: fewer than a tenth of the frames were not learned from "
                f"in {count(little, 'setting')}: see Synchronisation, below."
            )


def _interactions(scores: Sequence[Score]) -> Iterator[Block]:
    for score in scores:
        if score.interactions.empty:
            continue
        yield (
            f"Interactions, by {score.metric}: the effect of one option at one value of the "
            "other against its effect at the first. Seeds are paired, the test is Student's, and "
            f"Holm's method corrects p for {count(len(score.interactions), 'test')}."
        )
        yield list(score.interactions["finding"])


def _metrics(scores: Sequence[Score]) -> str:
    return joined(dict.fromkeys(score.metric for score in scores))


def _verdicts(report: Report) -> Iterator[str]:
    """One item for each line of the figure, or for each verdict."""
    for score in report.primary:
        table = score.comparisons
        if report.design is None:
            task = f"{score.task}, " if len(report.primary) > 1 else ""
            groups = dict(iter(table.groupby("verdict")["setting"]))
            for verdict in filter(groups.__contains__, VERDICTS):
                yield f"{task}{verdict}: {joined(groups[verdict])}"
            continue
        x = " + ".join(report.design.x)
        table = table.join(report.design.places.loc[score.task], on="setting")
        for (panel, line), inside in table.groupby(["panel", "line"], sort=False):
            groups = dict(iter(inside.groupby("verdict")["x"]))
            items = [f"{v} at {x} {joined(groups[v])}" for v in VERDICTS if v in groups]
            name = " · ".join(filter(None, (panel, line)))
            yield f"{name}: {'; '.join(items)}" if name else "; ".join(items)


def _tables(design: Design, cells: pd.DataFrame) -> Iterator[Block]:
    yield (
        "Means over seeds with Student's 95 % intervals. Against the baseline: ▼ lower, ▲ higher, "
        "≈ equivalent within the margin, = identical, ? cannot be told; none: not compared. "
        "Tests are of pairs with one seed, so whether these intervals overlap decides nothing."
    )
    x, hue = " + ".join(design.x), " + ".join(design.hue)
    for panel in design.panels:
        inside = cells[cells["panel"] == panel]
        texts = {(cell.line, cell.x): _cell(cell) for cell in inside.itertuples()}
        if len(design.panels) > 1:
            yield f"{panel}:"
        rows = [
            [line or "all", *(texts.get((line, value), NONE) for value in design.values)]
            for line in design.lines
            if (inside["line"] == line).any()
        ]
        yield Table([hue or "line", *(f"{x}={value}" for value in design.values)], rows, True)


def _cell(cell: Any) -> str:
    sign = SIGNS.get(cell.verdict, "")
    return f"{with_interval(cell.value, cell.low, cell.high)} {sign}".strip()


def _cautions(scores: Sequence[Score]) -> Iterator[Block]:
    """What a reader must know about few seeds, once for all settings that it is true of."""
    settings: dict[str, list[str]] = {}
    for score in scores:
        for setting in score.scores.index:
            settings.setdefault(caution(len(score.of(setting))), []).append(setting)
    settings.pop("", None)
    everywhere = sum(len(score.scores) for score in scores)
    if settings:
        yield [
            text + (f" ({joined(dict.fromkeys(labels))})" if len(labels) < everywhere else "")
            for text, labels in settings.items()
        ]
