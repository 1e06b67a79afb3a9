"""Whether one option changes the effect of another: differences of differences, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.options.errors import suggest
from harness.report.comparisons import holm, paired_test
from harness.report.settings import MISSING, Setting, by_size
from harness.report.statistics import LEVEL, Estimate
from harness.report.text import number, signed


@dataclass(frozen=True)
class Interaction:
    """The effect of one option at a value of another, against its effect at the first value."""

    change: str  # of the first option, `sync.lag from 0 to 6`
    at: str  # the value of the second, `algo.clip=0.3`
    base: str  # its first value, `algo.clip=0.1`
    rest: str  # the other options, if they differ
    effect: float  # mean change of the score at `at`
    base_effect: float
    difference: Estimate  # of the two, with Student's interval
    p: float  # of Student's test; NaN with too few seeds or without spread
    p_adjusted: float  # by Holm's method, for all of a report

    def sentence(self) -> str:
        """The finding in words."""
        where = f" ({self.rest})" if self.rest else ""
        seeds, difference = self.difference.num_seeds, self.difference
        effects = (
            f"Changing {self.change}{where} changes the score by {signed(self.effect)} with "
            f"{self.at} and by {signed(self.base_effect)} with {self.base}"
        )
        if not math.isfinite(self.p_adjusted):
            return f"{effects}: {seeds} shared seeds cannot tell these apart."
        word = "differ" if self.p_adjusted < 1 - LEVEL else "cannot be told apart"
        return (
            f"{effects}: these effects {word} (difference {signed(difference.value)}, interval "
            f"{number(difference.low)} to {number(difference.high)}, {seeds} seeds, "
            f"corrected p = {number(self.p_adjusted, 2)})."
        )


def interactions(
    settings: Sequence[Setting], scores: Mapping[str, Mapping[int, float]], named: str
) -> list[Interaction]:
    """Those of the two options that `a*b` names, for each of their later values.

    scores: setting → seed → score. Settings that differ in other options are kept apart.
    """
    first, second = _options(named, settings)
    groups: dict[str, dict[tuple[str, str], Mapping[int, float]]] = {}
    for setting in settings:
        others = [f"{k}={v}" for k, v in setting.values.items() if k not in (first, second)]
        place = (setting.options.get(first, MISSING), setting.options.get(second, MISSING))
        groups.setdefault(" · ".join(others), {})[place] = scores[setting.label]
    results = []
    for rest, cells in groups.items():
        starts, bases = (sorted({place[i] for place in cells}, key=by_size) for i in (0, 1))
        start, base = starts[0], bases[0]
        for at in bases[1:]:
            for value in starts[1:]:
                corners = [(value, at), (start, at), (value, base), (start, base)]
                if not all(corner in cells for corner in corners):
                    continue
                shared = sorted(set.intersection(*(set(cells[corner]) for corner in corners)))
                columns = [np.array([cells[corner][s] for s in shared]) for corner in corners]
                effects = columns[0] - columns[1], columns[2] - columns[3]
                difference, p = paired_test(*effects)
                effect, base_effect = (float(e.mean()) if len(e) else math.nan for e in effects)
                results.append(
                    Interaction(
                        change=f"{first} from {start} to {value}",
                        at=f"{second}={at}",
                        base=f"{second}={base}",
                        rest=rest,
                        effect=effect,
                        base_effect=base_effect,
                        difference=difference,
                        p=p,
                        p_adjusted=math.nan,
                    )
                )
    adjusted = holm([interaction.p for interaction in results])
    return [replace(one, p_adjusted=p) for one, p in zip(results, adjusted, strict=True)]


def _options(named: str, settings: Sequence[Setting]) -> tuple[str, str]:
    """The full names of both options."""
    options = list(settings[0].values) if settings else []
    parts = [part.strip() for part in named.split("*")]
    if len(parts) != 2:
        raise ValueError(f"--interaction is {named!r}, expected two options: sync.lag*algo.clip")
    keys = []
    for part in parts:
        matches = [key for key in options if part in (key, key.rsplit(".", 1)[-1])]
        if len(matches) != 1:
            raise ValueError(f"--interaction names {part!r}; {suggest(part, options)}")
        keys += matches
    if keys[0] == keys[1]:
        raise ValueError(f"--interaction is {named!r}, expected two different options")
    return keys[0], keys[1]
