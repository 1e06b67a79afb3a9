"""The options of a sweep as factors: one on the x axis, one by colour, one by panel.

A factor may be several options. Options that others determine are zipped with those, and need no
place of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from harness.errors import suggest
from harness.report.runs import OURS
from harness.report.settings import MISSING, TASK, Factor, Options, Plan, by_size, values_of


@dataclass(frozen=True)
class Design:
    """Which options make up the x axis, the lines and the panels."""

    x: Factor
    hue: Factor
    facet: Factor
    values: list[str]  # of x, in order
    lines: list[str]
    panels: list[str]
    places: pd.DataFrame  # x, line and panel of each (task, setting), by the names of their values

    @property
    def factors(self) -> Factor:
        return self.x + self.hue + self.facet

    def first(self, settings: pd.DataFrame) -> Options:
        """What the others on the x axis are compared with: Lockstep's runs, or the first value."""
        value = min(
            values_of(settings, self.x), key=lambda texts: (OURS not in texts, _order(texts))
        )
        return dict(zip(self.x, value, strict=True))


def make_design(plan: Plan, x: str, hue: str | None, facet: str | None) -> Design:
    """Find a place for every option in which the settings of a task differ.

    What has none, and does not follow from those that have, joins the lines.
    """
    options = [key for key in TASK if key in plan.differing]
    options += [key for keys in plan.names.values() for key in keys]
    options = list(dict.fromkeys(options))
    chosen: list[Factor] = []
    for name, text in (("--x", x), ("--hue", hue), ("--facet", facet)):
        taken = {key for factor in chosen for key in factor}
        keys = _keys(name, text, options, plan) if text else ()
        if both := taken & set(keys):
            raise ValueError(f"{name} {text}: {min(both)} has a place already")
        chosen.append(keys)
    xs, hues, facets = map(list, chosen)
    if not xs:
        raise ValueError(f"--x is {x!r}, of which all runs have the same value")
    for key in options:
        placed = [*xs, *hues, *facets]
        if key in placed:
            continue
        if key in TASK:
            facets.append(key)
        elif plan.settings.groupby(placed)[key].nunique().gt(1).any():  # they do not determine it
            hues.append(key)
    factors = (tuple(xs), tuple(hues), tuple(facets))
    names = [_names(xs, plan.settings)] + [
        _names(factor, plan.settings, with_option=True) for factor in (hues, facets)
    ]
    places = {
        place: [named[value] for value in values_of(plan.settings, factor)]
        for place, factor, named in zip(("x", "line", "panel"), factors, names, strict=True)
    }
    values, lines, panels = (list(named.values()) for named in names)
    table = pd.DataFrame(places, plan.settings.index, dtype=object)
    return Design(*factors, values, lines, panels, table)


def _order(values: Sequence[str]) -> list[tuple[int, float, str]]:
    return [by_size(value) for value in values]


def _names(
    factor: Sequence[str], settings: pd.DataFrame, *, with_option: bool = False
) -> dict[tuple[str, ...], str]:
    """What each value of a factor is called, in order: as short as it can be, but unique.

    with_option: a number alone says nothing, so it has the name of its option, as in epochs=3.
    """
    combinations = sorted(set(values_of(settings, factor)), key=_order)
    if len(factor) <= 1:
        alone = {values: "".join(values) for values in combinations}
        if not with_option or not factor:
            return alone
        last = factor[0].rsplit(".", 1)[-1]
        return {
            values: f"{last}={name}" if by_size(name)[0] == 0 else name
            for values, name in alone.items()
        }
    short = {values: _short(factor, values) for values in combinations}
    if len(set(short.values())) == len(short) and all(short.values()):
        return short
    return {
        values: " · ".join(f"{k}={v}" for k, v in zip(factor, values, strict=True))
        for values in combinations
    }


def _short(factor: Sequence[str], values: Sequence[str]) -> str:
    """Flags by their names if set, words as they are, and numbers after their names."""
    words = []
    for key, value in zip(factor, values, strict=True):
        last = key.rsplit(".", 1)[-1]
        if value == "true":
            words.append(last)
        elif value not in ("false", MISSING):
            words.append(f"{last}={value}" if by_size(value)[0] == 0 else value)
    return " · ".join(words)


def _keys(name: str, text: str, options: Sequence[str], plan: Plan) -> Factor:
    """The options that `a+b` names: each by its own name, or as the group that it is in."""
    keys: list[str] = []
    for wanted in text.split("+"):
        if not any(_is_in(key, wanted) for key in plan.settings):
            raise ValueError(f"{name} is {wanted!r}; {suggest(wanted, options or plan.settings)}")
        keys += [key for key in options if _is_in(key, wanted) and key not in keys]
    return tuple(keys)


def _is_in(key: str, wanted: str) -> bool:
    return key == wanted or key.startswith(f"{wanted}.")
