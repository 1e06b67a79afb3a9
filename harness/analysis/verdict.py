"""How a report opens: the verdict in one sentence, the figure that shows it, and its table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from harness.analysis import drawing, factor_figures, figures
from harness.analysis.blocks import Block, Table
from harness.analysis.comparisons import EQUIVALENT, UNDECIDED, VERDICTS, WITHIN, Comparison
from harness.analysis.findings import Findings
from harness.analysis.response import Panel, Response
from harness.analysis.statistics import caution, student
from harness.analysis.text import count, joined, number, with_interval

SIGNS = dict(zip(VERDICTS, ("▼", "≈▼", "≈", "≈▲", "▲", "?"), strict=True))


def open_with(found: Sequence[Findings], response: Response | None) -> Iterator[Block | None]:
    """The blocks of the first section, about the primary score of each task."""
    yield sentence(found)
    if not _have_scores(found):
        return
    if response is None:
        yield drawing.draw(
            figures.scores,
            found,
            "scores",
            f"{_scores(found)}: a dot for each seed; below them the mean and its 95 % interval.",
        )
    else:
        band = " The grey band is the margin about the baseline." * any(f.baseline for f in found)
        yield drawing.draw(
            factor_figures.response,
            response,
            "response",
            f"{_scores(found)}: means over seeds with Student's 95 % intervals.{band}",
        )
        yield from _tables(response)
    yield [said for findings in found for said in _findings(findings, response, len(found) > 1)]
    yield from _cautions(found)


def sentence(found: Sequence[Findings]) -> str:
    """What the comparisons of all tasks show."""
    if not _have_scores(found):
        if any(run.is_done for f in found for s in f.task.settings for run in s.runs):
            return f"No finished run has a score ({_scores(found)}): there is nothing to compare."
        return (
            "No run has finished, so there is nothing to compare. See Failures and damage, below."
        )
    compared = [(f, c) for f in found for c in f.comparisons]
    if not compared:
        scored = [(f, r) for f in found for r in f.results if r.scores]
        if not scored or len(scored) > len({f.task.name for f, _ in scored}):
            return "There is nothing to compare: no setting shares a finished seed with another."
        means = [
            f"{with_interval(student(list(r.scores.values())))} on {f.task.name} "
            f"({count(len(r.scores), 'seed')})"
            for f, r in scored
        ]
        return f"The {_scores(found)} is {joined(means)}; there is nothing to compare it with."
    if len(compared) == 1:
        return compared[0][1].sentence()
    told = Counter(comparison.verdict() for _, comparison in compared)
    differ = sum(n for verdict, n in told.items() if verdict not in (EQUIVALENT, UNDECIDED))
    small = sum(n for verdict, n in told.items() if verdict.endswith(WITHIN))
    inside = f" ({small} by less than the margin)" * bool(small)
    parts = [f"{differ} differ{'s' * (differ == 1)}{inside}"] * bool(differ)
    if told[EQUIVALENT]:
        are = "is" if told[EQUIVALENT] == 1 else "are"
        parts.append(f"{told[EQUIVALENT]} {are} equivalent within {found[0].margin}")
    if told[UNDECIDED]:
        parts.append(f"{told[UNDECIDED]} cannot be told from it")
    against = joined(dict.fromkeys(f.against for f in found if f.comparisons))
    text = (
        f"By {_scores(found)}, of {count(len(compared), 'setting')} compared with {against}, "
        f"{joined(parts)}"
    )
    sure = [(f, c) for f, c in compared if c.is_told_apart()]
    if not sure:
        return f"{text}."
    findings, largest = max(sure, key=lambda pair: abs(_relative(*pair)))
    share = _relative(findings, largest)
    where = f" on {findings.task.name}" * (len(found) > 1)
    size = f" ({100 * share:+.0f} %)" if math.isfinite(share) else ""
    return (
        f"{text}; the largest difference is {number(largest.difference.value)}{size}: "
        f"{_name(findings, largest.name)}{where}."
    )


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


def _findings(findings: Findings, response: Response | None, several: bool) -> Iterator[str]:
    """One item for each line of the figure, or for each verdict."""
    task = f"{findings.task.name}, " * several
    groups: dict[str, dict[str, list[str]]] = {}
    for comparison in findings.comparisons:
        line, name = comparison.verdict(), comparison.name
        if response is not None:
            place = response.design.place(findings.result(name).setting)
            name, line = place.x, " · ".join(filter(None, (place.panel, place.line)))
        groups.setdefault(line, {}).setdefault(comparison.verdict(), []).append(name)
    if response is None:
        for verdict in filter(groups.__contains__, VERDICTS):
            yield f"{task}{verdict}: {joined(groups[verdict][verdict])}"
        return
    x = " + ".join(response.design.x)
    for line, told in groups.items():
        said = [f"{v} at {x} {joined(told[v])}" for v in VERDICTS if v in told]
        yield f"{line}: {'; '.join(said)}" if line else "; ".join(said)


def _tables(response: Response) -> Iterator[Block]:
    design = response.design
    yield (
        "Means over seeds with Student's 95 % intervals. Against the baseline: ▼ lower, ▲ higher, "
        "≈ equivalent within the margin, ? cannot be told; none: not compared."
    )
    for panel in response.panels:
        if len(response.panels) > 1:
            yield f"{panel.title}:"
        rows = [
            [line or "all", *(_cell(panel, line, x) for x in design.values)]
            for line in design.lines
            if any((line, x) in panel.cells for x in design.values)
        ]
        x, hue = " + ".join(design.x), " + ".join(design.hue)
        yield Table([hue or "line", *(f"{x}={value}" for value in design.values)], rows, True)


def _cell(panel: Panel, line: str, x: str) -> str:
    if (cell := panel.cells.get((line, x))) is None:
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
