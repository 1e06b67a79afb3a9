"""What distinguishes runs: the options that differ, names for settings, and their replicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.report.read import Run

SOURCE = "sweep"  # stands for an option where sweeps are compared with each other
# They change nothing that is measured, so runs that differ in them replicate each other. So do
# those that differ in a seed, of whatever part: `sync.link.seed` follows `seed`.
INCIDENTAL = ("seed", "name", "print_every_s", "skip_done", "skip_impossible", "resume")
INCIDENTAL_GROUPS = ("logger.", "checkpoint.")
TASK = ("algo.name", "env.id")
MISSING = "(not set)"


@dataclass
class Setting:
    """Runs of one task that differ in nothing but their seed."""

    label: str
    values: dict[str, str]  # of the options that distinguish it
    runs: list[Run] = field(default_factory=list)  # all, whatever became of them
    done: dict[int, Run] = field(default_factory=dict)  # by seed: what statistics are made of


@dataclass
class Task:
    """An algorithm in an environment: scores compare within it, not beyond."""

    name: str
    env: str
    settings: list[Setting]


@dataclass
class Plan:
    """All runs in their places."""

    tasks: list[Task]
    differing: dict[str, list[str]]  # option → its values, if it differs within a task
    common: dict[str, str]  # options that are the same everywhere
    notes: list[str]  # what was left out, and why


def arrange(runs: Sequence[Run], *, by_source: bool = False) -> Plan:
    """Sort runs into tasks and settings. `by_source` keeps what was named separately apart."""
    known = [run for run in runs if run.options]
    options = {id(run): _described(run, by_source) for run in known}
    notes: list[str] = []
    named: dict[str, list[Run]] = {}
    for run in known:
        named.setdefault(_task_name(options[id(run)]), []).append(run)
    groups = [[options[id(run)] for run in group] for group in named.values()]
    differing: dict[str, list[str]] = {}
    common: dict[str, str] = {}
    for key in _keys(list(options.values())):
        values = {own.get(key, MISSING) for own in options.values()}
        if len(values) == 1:
            common[key] = values.pop()
        elif key.endswith(".seed") and all(
            own.get(key) == own.get("seed") for own in options.values()
        ):
            continue  # says nothing that `seed` does not
        elif key in TASK or any(len({own.get(key, MISSING) for own in g}) > 1 for g in groups):
            differing[key] = sorted(values, key=_natural)
    tasks = [
        Task(name, options[id(group[0])].get("env.id", ""), _settings(group, options, notes))
        for name, group in sorted(named.items())
    ]
    lost = len(runs) - len(known)
    if lost:
        notes.append(f"Without a readable config, so in no setting: {lost} of {len(runs)} runs")
    return Plan(tasks, differing, common, notes)


def _described(run: Run, by_source: bool) -> dict[str, str]:
    found = {SOURCE: run.source} if by_source else {}
    found |= {key: text(value) for key, value in run.options.items() if key != SOURCE}
    return found


def text(value: Any) -> str:
    """An option's value as YAML would have it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keys(options: Sequence[dict[str, str]]) -> list[str]:
    """Every option of any run: names of parts first, since they say most; else as stored."""
    keys = list(dict.fromkeys(key for own in options for key in own))
    return sorted(keys, key=lambda key: (key != SOURCE, key.count(".") == 0, _rank(key)))


def _rank(key: str) -> int:
    order = ("sync.name", "collector.name", "algo.name", "env.id", "model.name")
    return order.index(key) if key in order else len(order)


def _is_incidental(key: str) -> bool:
    if key == SOURCE:
        return False
    return key in INCIDENTAL or key.endswith(".seed") or key.startswith(INCIDENTAL_GROUPS)


def _task_name(own: dict[str, str]) -> str:
    return " on ".join(own.get(key, MISSING) for key in TASK)


def _settings(
    runs: Sequence[Run], options: dict[int, dict[str, str]], notes: list[str]
) -> list[Setting]:
    own = [options[id(run)] for run in runs]
    keys = telling(own)
    found: dict[tuple[str, ...], Setting] = {}
    for run in sorted(runs, key=lambda run: (run.name, run.seed or 0)):
        values = {key: options[id(run)].get(key, MISSING) for key in keys}
        setting = found.setdefault(tuple(values.values()), Setting(label(values), values))
        setting.runs.append(run)
    for setting in found.values():
        _pick_done(setting, notes)
    named = list(dict.fromkeys(own[SOURCE] for own in options.values() if SOURCE in own))

    def place(values: tuple[str, ...]) -> list[tuple[int, float, str]]:
        """Sweeps as they were named, everything else by its value."""
        return [
            (named.index(value), 0.0, "") if key == SOURCE else _natural(value)
            for key, value in zip(keys, values, strict=True)
        ]

    return [found[values] for values in sorted(found, key=place)]


def telling(options: Sequence[dict[str, str]]) -> list[str]:
    """The fewest options, in their order, by which all settings can be told apart.

    What follows from others (the workers from the collector's name, say) is left out.
    """
    kept: list[str] = []
    parts = 1
    for key in _keys(options):
        if _is_incidental(key):
            continue
        tried = [*kept, key]
        finer = len({tuple(own.get(k, MISSING) for k in tried) for own in options})
        if finer > parts:
            kept, parts = tried, finer
    return kept


def label(values: dict[str, str]) -> str:
    """A setting's name: parts by their names alone, other options with theirs."""
    if not values:
        return "all runs"
    said = Counter(key.rsplit(".", 1)[-1] for key in values)
    words = []
    for key, value in values.items():
        last = key.rsplit(".", 1)[-1]
        if last in ("name", "id") or key == SOURCE:
            words.append(value)
        else:
            words.append(f"{last if said[last] == 1 else key}={value}")
    return " · ".join(words)


def _pick_done(setting: Setting, notes: list[str]) -> None:
    """Of several finished runs of one seed the newest counts: a seed is one replication."""
    for run in setting.runs:
        if not run.is_done or run.seed is None:
            continue
        before = setting.done.get(run.seed)
        newest = run if before is None else max(before, run, key=_started)
        if before is not None:
            older = run if newest is before else before
            notes.append(
                f"{older.name} is left out: {newest.name} ran the same config and seed, and later"
            )
        setting.done[run.seed] = newest


def _started(run: Run) -> tuple[str, str]:
    return str(run.manifest.get("started") or ""), run.name


def _natural(value: str) -> tuple[int, float, str]:
    """Numbers by size, then words."""
    try:
        number = float(value)
    except ValueError:
        number = math.inf
    return (0, number, value) if math.isfinite(number) else (1, 0.0, value)
