"""How a report opens: the verdict in one sentence, the figure that shows it, and its table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from harness.logging.numbers import Unused
from harness.report import drawing, figures
from harness.report.comparisons import (
    EQUIVALENT,
    IDENTICAL,
    POWER,
    UNDECIDED,
    VERDICTS,
    WITHIN,
    Comparison,
    Margin,
)
from harness.report.findings import TRAINED, Cell, Findings, primary
from harness.report.pages import Block, Table
from harness.report.statistics import caution, student
from harness.report.text import count, joined, number, plural, with_interval

SIGNS = dict(zip(VERDICTS, ("▼", "≈▼", "≈", "=", "≈▲", "▲", "?"), strict=True))


def open_with(
    every: Sequence[Findings], cells: Sequence[Cell] = (), notes: Sequence[str] = ()
) -> Iterator[Block | None]:
    """The blocks of the first section, about the primary score of each task.

    notes: which runs are in no setting, or are replaced by later ones.
    """
    found = primary(every)
    yield sentence(found)
    if left_out := [*_unscored(found), *notes]:
        yield left_out
    if not _have_scores(found):
        return
    if not cells:
        yield drawing.draw(
            figures.scores,
            found,
            "scores",
            f"{_scores(found)}: a dot for each seed; below them the mean and its 95 % interval.",
        )
    else:
        has_band = any(findings.baseline for findings in found)
        band = " The grey band is the margin about the baseline." if has_band else ""
        yield drawing.draw(
            figures.response,
            cells,
            "response",
            f"{_scores(found)}: means over seeds with Student's 95 % intervals.{band}",
        )
        yield from _tables(cells)
    yield from _definition(found)
    yield from _interactions(found)
    said = [said for findings in found for said in _findings(findings, len(found) > 1)]
    yield [*said, *_opposite(every), *_seeds_needed(found), *_unused(found)]
    yield from _cautions(found)


def sentence(found: Sequence[Findings]) -> str:
    """What the comparisons of all tasks show."""
    compared = [(f, c) for f in found for c in f.comparisons]
    if not _have_scores(found):
        return _without_scores(found)
    if not compared:
        return _without_comparisons(found)
    if len(compared) == 1:
        return f"By {_scores(found)}: {compared[0][1].sentence()}"
    against = joined(dict.fromkeys(f.against for f in found if f.comparisons))
    counts = _counts([c for _, c in compared], found[0].margin)
    text = (
        f"By {_scores(found)}, of {count(len(compared), 'setting')} compared with {against}, "
        f"{joined(counts)}"
    )
    if not any(c.is_told_apart() for _, c in compared):
        return f"{text}."
    return f"{text}; the largest difference is {_largest_difference(compared, len(found) > 1)}."


def _without_scores(found: Sequence[Findings]) -> str:
    if any(run.is_done for f in found for s in f.task.settings for run in s.runs):
        return f"No finished run has a score ({_scores(found)}): there is nothing to compare."
    return "No run has finished, so there is nothing to compare. See Failures and damage, below."


def _without_comparisons(found: Sequence[Findings]) -> str:
    """The score of each task, if it has one setting."""
    scored = [(f, r) for f in found for r in f.results if r.scores]
    if not scored or len(scored) > len({f.task.name for f, _ in scored}):
        return "There is nothing to compare: no setting shares a finished seed with another."
    means = [
        f"{with_interval(student(list(r.scores.values())))} on {f.task.name} "
        f"({count(len(r.scores), 'seed')})"
        for f, r in scored
    ]
    return f"The {_scores(found)} is {joined(means)}; there is nothing to compare it with."


def _counts(comparisons: Sequence[Comparison], margin: Margin) -> Iterator[str]:
    """How many settings have which verdict."""
    verdicts = Counter(comparison.verdict() for comparison in comparisons)
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


def _largest_difference(
    compared: Sequence[tuple[Findings, Comparison]], has_several_tasks: bool
) -> str:
    """Of those that are told apart, as shares of the baseline's mean."""
    sure = [(f, c) for f, c in compared if c.is_told_apart()]
    findings, largest = max(sure, key=lambda pair: abs(_relative(*pair)))
    share = _relative(findings, largest)
    size = f" ({100 * share:+.0f} %)" if math.isfinite(share) else ""
    where = f" on {findings.task.name}" if has_several_tasks else ""
    return f"{number(largest.difference.value)}{size}: {_name(findings, largest.name)}{where}"


def _definition(found: Sequence[Findings]) -> Iterator[Block]:
    """What the score is, where its name does not say it."""
    if any(findings.score.startswith(f"mean {TRAINED}") for findings in found):
        yield (
            f"Mean {TRAINED} is the mean return over the frames of a run, from its first to its "
            "last. A frame counts with the mean return of the episodes that ended in its record "
            "or, where none did, in the next record with ended episodes. Frames after the last "
            "such record count with its value."
        )


def _unscored(found: Sequence[Findings]) -> Iterator[str]:
    """The finished runs that are in no number of the verdict, and why."""
    for findings in found:
        if runs := findings.unscored():
            are, names = plural(len(runs), "is", "are"), joined(run.name for run in runs)
            yield f"Left out: {names} {are} finished, but {findings.lacking}"


def _opposite(every: Sequence[Findings]) -> Iterator[str]:
    """Differences of training whose order is the other one at the end, if one of them is shown."""
    for final in every:
        if final.throughout is None or not final.throughout.is_primary:
            continue
        at_end = {(c.name, c.baseline): c for c in final.comparisons}
        for comparison in final.throughout.comparisons:
            end = at_end.get((comparison.name, comparison.baseline))
            if end is None or not (comparison.is_told_apart() or end.is_told_apart()):
                continue
            if end.difference.value * comparison.difference.value < 0:
                sure = "" if end.is_told_apart() else ", which could be chance"
                word = "higher" if end.difference.value > 0 else "lower"
                yield (
                    f"At the end of the runs the order is the opposite: by {final.score}, "
                    f"{end.name} is {number(abs(end.difference.value))} {word} than "
                    f"{end.baseline} (corrected p = {number(end.p_adjusted, 2)}){sure}."
                )


def _seeds_needed(found: Sequence[Findings]) -> Iterator[str]:
    """How many seeds would decide what these could not."""
    for findings in found:
        undecided = [c for c in findings.comparisons if c.verdict() == UNDECIDED]
        tests = len(findings.comparisons)
        needed = sorted(n for c in undecided if (n := c.pairs_needed(tests)) is not None)
        if needed:
            task = f" on {findings.task.name}" if len(found) > 1 else ""
            least, most = needed[0], needed[-1]
            seeds = f"{least}" if least == most else f"{least} to {most}"
            yield (
                f"To tell a difference of {findings.margin}{task} from chance, you need about "
                f"{seeds} seeds, judged by the variance of these pairs (power {POWER:.0%})."
            )


def _unused(found: Sequence[Findings]) -> Iterator[str]:
    """Which frames were not learned from, and how many updates there were."""
    for findings in found:
        little = 0
        for result in findings.results:
            runs = [run.summary for run in result.runs if "updates" in run.summary]
            if not runs:
                continue
            worst = max(map(Unused.of, runs), key=lambda unused: unused.share)
            little += bool(worst.count) and not worst.is_much
            if worst.is_much:
                updates = joined(dict.fromkeys(number(summary["updates"]) for summary in runs))
                yield (
                    f"Warning: {result.label} did not learn from {worst} of the frames of a run; "
                    f"its runs made {updates} updates."
                )
        if little:
            yield (
                f"{findings.task.name}: fewer than a tenth of the frames were not learned from "
                f"in {count(little, 'setting')}: see Synchronisation, below."
            )


def _interactions(found: Sequence[Findings]) -> Iterator[Block]:
    for findings in found:
        if not (several := findings.interactions):
            continue
        yield (
            f"Interactions, by {findings.score}: the effect of one option at one value of the "
            "other against its effect at the first. Seeds are paired, the test is Student's, and "
            f"Holm's method corrects p for {count(len(several), 'test')}."
        )
        yield [interaction.sentence() for interaction in several]


def _have_scores(found: Sequence[Findings]) -> bool:
    return any(result.scores for findings in found for result in findings.results)


def _name(findings: Findings, label: str) -> str:
    """What the figure calls a setting."""
    if (design := findings.design) is None:
        return label
    place = design.place(findings.result(label).setting)
    return " · ".join(filter(None, (place.line, f"{' + '.join(design.x)}={place.x}")))


def _relative(findings: Findings, comparison: Comparison) -> float:
    """The difference as a share of the baseline's mean."""
    scores = findings.result(comparison.baseline).scores.values()
    mean = abs(sum(scores)) / len(scores) if scores else 0.0
    return comparison.difference.value / mean if mean else math.nan


def _scores(found: Sequence[Findings]) -> str:
    return joined(dict.fromkeys(findings.score for findings in found))


def _findings(findings: Findings, several: bool) -> Iterator[str]:
    """One item for each line of the figure, or for each verdict."""
    task, design = f"{findings.task.name}, " if several else "", findings.design
    groups: dict[str, dict[str, list[str]]] = {}
    for comparison in findings.comparisons:
        line, name = comparison.verdict(), comparison.name
        if design is not None:
            place = design.place(findings.result(name).setting)
            name, line = place.x, " · ".join(filter(None, (place.panel, place.line)))
        groups.setdefault(line, {}).setdefault(comparison.verdict(), []).append(name)
    if design is None:
        for verdict in filter(groups.__contains__, VERDICTS):
            yield f"{task}{verdict}: {joined(groups[verdict][verdict])}"
        return
    x = " + ".join(design.x)
    for line, told in groups.items():
        said = [f"{v} at {x} {joined(told[v])}" for v in VERDICTS if v in told]
        yield f"{line}: {'; '.join(said)}" if line else "; ".join(said)


def _tables(cells: Sequence[Cell]) -> Iterator[Block]:
    design = cells[0].findings.design
    assert design is not None
    yield (
        "Means over seeds with Student's 95 % intervals. Against the baseline: ▼ lower, ▲ higher, "
        "≈ equivalent within the margin, = identical, ? cannot be told; none: not compared."
    )
    x, hue = " + ".join(design.x), " + ".join(design.hue)
    for panel in design.panels:
        inside = {(cell.line, cell.x): cell for cell in cells if cell.panel == panel}
        if len(design.panels) > 1:
            yield f"{panel}:"
        rows = [
            [line or "all", *(_cell(inside.get((line, value))) for value in design.values)]
            for line in design.lines
            if any((line, value) in inside for value in design.values)
        ]
        yield Table([hue or "line", *(f"{x}={value}" for value in design.values)], rows, True)


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return with_interval(None)
    sign = SIGNS[cell.comparison.verdict()] if cell.comparison else ""
    return f"{with_interval(cell.mean)} {sign}".strip()


def _cautions(found: Sequence[Findings]) -> Iterator[Block]:
    """What a reader must know about few seeds, once for all settings that it is true of."""
    told: dict[str, list[str]] = {}
    for findings in found:
        for result in findings.results:
            told.setdefault(caution(len(result.scores)), []).append(result.label)
    told.pop("", None)
    everywhere = sum(len(findings.results) for findings in found)
    if told:
        yield [
            said + (f" ({joined(dict.fromkeys(labels))})" if len(labels) < everywhere else "")
            for said, labels in told.items()
        ]
