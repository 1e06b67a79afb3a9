"""The options of a sweep as factors: one on the x axis, one by colour, one by panel.

A factor may be several options. Options that others determine are zipped with those, and need no
place of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.options.errors import suggest
from harness.report.settings import MISSING, TASK, Factor, Options, Plan, Setting, by_size


class Place(NamedTuple):
    """Where a setting stands in the figures, by the names of its values."""

    x: str
    line: str
    panel: str


@dataclass(frozen=True)
class Design:
    """Which options make up the x axis, the lines and the panels."""

    x: Factor
    hue: Factor
    facet: Factor
    values: list[str]  # of x, in order
    lines: list[str]
    panels: list[str]
    places: dict[int, Place]  # by the id of the setting

    def place(self, setting: Setting) -> Place:
        return self.places[id(setting)]

    @property
    def factors(self) -> Factor:
        return self.x + self.hue + self.facet

    def first(self, settings: Sequence[Setting]) -> Options:
        """The first value on the x axis, for the other ones to be compared with."""
        value = min((_values(self.x, setting) for setting in settings), key=_order)
        return dict(zip(self.x, value, strict=True))


def make_design(plan: Plan, x: str, hue: str | None, facet: str | None) -> Design:
    """Find a place for every option in which the settings of a task differ.

    What has none, and does not follow from those that have, joins the lines.
    """
    options = [key for key in TASK if key in plan.differing]
    for task in plan.tasks:
        options += [key for key in task.settings[0].values if key not in options]
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
    settings = [setting for task in plan.tasks for setting in task.settings]
    for key in options:
        if key in (*xs, *hues, *facets):
            continue
        if key in TASK:
            facets.append(key)
        elif not _follows(key, [*xs, *hues, *facets], settings):
            hues.append(key)
    factors = (tuple(xs), tuple(hues), tuple(facets))
    names = [_names(factor, settings) for factor in factors]
    places = {
        id(setting): Place(
            *(named[_values(f, setting)] for f, named in zip(factors, names, strict=True))
        )
        for setting in settings
    }
    values, lines, panels = (list(named.values()) for named in names)
    return Design(*factors, values, lines, panels, places)


def _values(factor: Iterable[str], setting: Setting) -> tuple[str, ...]:
    return tuple(setting.options.get(key, MISSING) for key in factor)


def _order(values: Sequence[str]) -> list[tuple[int, float, str]]:
    return [by_size(value) for value in values]


def _names(factor: Factor, settings: Sequence[Setting]) -> dict[tuple[str, ...], str]:
    """What each value of a factor is called, in order: as short as it can be, but unique."""
    combinations = sorted({_values(factor, setting) for setting in settings}, key=_order)
    if len(factor) <= 1:
        return {values: "".join(values) for values in combinations}
    short = {values: _short(factor, values) for values in combinations}
    if len(set(short.values())) == len(short) and all(short.values()):
        return short
    return {
        values: " · ".join(f"{k}={v}" for k, v in zip(factor, values, strict=True))
        for values in combinations
    }


def _short(factor: Factor, values: Sequence[str]) -> str:
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
    everywhere = {key for task in plan.tasks for s in task.settings for key in s.options}
    for wanted in text.split("+"):
        if not any(_is_in(key, wanted) for key in everywhere):
            raise ValueError(f"{name} is {wanted!r}; {suggest(wanted, options or everywhere)}")
        keys += [key for key in options if _is_in(key, wanted) and key not in keys]
    return tuple(keys)


def _is_in(key: str, wanted: str) -> bool:
    return key == wanted or key.startswith(f"{wanted}.")


def _follows(key: str, chosen: Sequence[str], settings: Sequence[Setting]) -> bool:
    """Whether the chosen options determine this one: it is zipped with them."""
    determined: dict[tuple[str, ...], str] = {}
    return all(
        determined.setdefault(_values(chosen, setting), value) == value
        for setting in settings
        for value in _values((key,), setting)
    )
