"""All tasks together, in a measure that needs no common scale: who scores more, how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.statistics import Estimate, probability_of_improvement
from harness.report.analysis import Findings


@dataclass(frozen=True)
class Total:
    """A setting against the baseline, over all tasks."""

    name: str
    baseline: str
    num_tasks: int
    better: Estimate  # the mean over tasks of the probability to score more


def totals(found: Sequence[Findings]) -> list[Total]:
    """Of every setting that has scores in each of several tasks, beside one baseline's."""
    baselines = {findings.baseline for findings in found}
    baseline = next(iter(baselines), None)
    if len(found) < 2 or len(baselines) > 1 or baseline is None:
        return []
    everywhere = [
        result.label
        for result in found[0].results
        if all(result.label in findings.improvements for findings in found)
    ]
    return [
        Total(
            name,
            baseline,
            len(found),
            probability_of_improvement(_strata(found, name), _strata(found, baseline)),
        )
        for name in everywhere
    ]


def _strata(found: Sequence[Findings], name: str) -> list[np.ndarray]:
    return [np.array(list(findings.result(name).scores.values())) for findings in found]
