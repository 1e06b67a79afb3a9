"""A score over the factors of a sweep: what the figure shows, and the table behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from harness.analysis.comparisons import Comparison
from harness.analysis.design import Design
from harness.analysis.findings import Findings, Result
from harness.analysis.statistics import Estimate, student

OCTAVES = 3  # numbers that span more are spaced by their logarithm


@dataclass
class Cell:
    """One setting in its place."""

    result: Result
    mean: Estimate
    comparison: Comparison | None


@dataclass
class Panel:
    """What has one value of the facet."""

    title: str
    findings: list[Findings] = field(default_factory=list)  # the tasks in it
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)  # by line and value of x


@dataclass
class Response:
    """A score in the places of a design."""

    design: Design
    panels: list[Panel]


def respond(design: Design, found: Sequence[Findings]) -> Response:
    """The score of every setting in its place."""
    panels = {title: Panel(title) for title in design.panels}
    for findings in found:
        compared = {comparison.name: comparison for comparison in findings.comparisons}
        for result in findings.results:
            x, line, title = design.place(result.setting)
            panel = panels[title]
            if not any(findings is known for known in panel.findings):
                panel.findings.append(findings)
            if result.scores:
                mean = student(list(result.scores.values()))
                panel.cells[line, x] = Cell(result, mean, compared.get(result.label))
    return Response(design, list(panels.values()))


def are_numbers(values: Sequence[str]) -> bool:
    """Whether all are finite numbers; otherwise they are categories."""
    try:
        return all(math.isfinite(float(value)) for value in values)
    except ValueError:
        return False


def positions(values: Sequence[str]) -> list[float]:
    """Where the values of x stand: by size, by the logarithm of it, or one after the other.

    On a logarithmic axis zero stands one step before the least, the smallest between two values.
    """
    if not are_numbers(values):
        return [float(place) for place in range(len(values))]
    numbers = [float(value) for value in values]
    positive = [number for number in numbers if number > 0]
    if min(numbers) < 0 or not positive or max(positive) < 2**OCTAVES * min(positive):
        return numbers
    logs = sorted({math.log2(number) for number in positive})
    zero = logs[0] - min(b - a for a, b in pairwise(logs))
    return [math.log2(number) if number else zero for number in numbers]
