"""Runs sorted into tasks and settings by the options in which they differ."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.options.typed import show
from harness.report.read_runs import Run
from harness.report.runs import FRAMEWORK
from harness.report.text import plural

SOURCE = "sweep"  # stands for an option where sweeps are compared with each other
# These change nothing that is measured: runs that differ in them alone replicate each other.
INCIDENTAL = (
    "logger",
    "name",
    "print_every_s",
    "skip_done",
    "replace_done",
    "skip_impossible",
    "resume",
)
INCIDENTAL_GROUPS = ("logger.", "checkpoint.")
# The run's, and those of its own parts, which follow it. A seed of the environment's is not among
# them: `env.kwargs.level_seed` may be what is studied.
SEEDS = ("seed", "sync.lag_seed", "sync.link.seed", "sync.tear.seed")
FIRST = ("sync.name", "collector.name", "algo.name", "env.id", "model.name")
# The recorded schedule stands in place of these.
UNUSED_BY_REPLAY = ("collector.costs.", "collector.network.", "collector.failures")
PART = "algo.objective"  # a part within a group: its name, or its name with options
REPLAY = "collector.replay"
TASK = ("algo.name", "env.id")
MISSING = "(not set)"

Options = dict[str, str]  # of one run, by dotted names
Factor = tuple[str, ...]  # names of options that are varied together


@dataclass
class Setting:
    """Runs of one task that differ in nothing but their seed."""

    label: str
    values: Options  # of the options that distinguish it
    options: Options = field(default_factory=dict)  # all of its first run
    runs: list[Run] = field(default_factory=list)  # all, finished or not
    done: dict[int, Run] = field(default_factory=dict)  # by seed: the runs behind the statistics


@dataclass
class Task:
    """An algorithm in an environment: scores are compared within it only."""

    name: str
    env: str
    settings: list[Setting]


@dataclass
class Plan:
    """All runs, by task and setting."""

    tasks: list[Task]
    differing: dict[str, list[str]]  # option → its values, if it differs within a task
    implied: set[str]  # those of them that only some parts have, which all of them set alike
    common: Options  # those that are the same everywhere
    notes: list[str]  # what was left out, and why


def arrange(runs: Sequence[Run], *, by_source: bool = False) -> Plan:
    """Sort runs into tasks and settings. `by_source` keeps the directories named apart."""
    readable = [run for run in runs if run.options]
    options = _kinds_as_one([_parts_as_typed(_options(run, by_source)) for run in readable])
    groups: dict[str, list[tuple[Run, Options]]] = {}
    for run, row in zip(readable, options, strict=True):
        groups.setdefault(" on ".join(row.get(key, MISSING) for key in TASK), []).append((run, row))
    replaced: list[tuple[Run, Run]] = []
    tasks = [
        Task(name, group[0][1].get("env.id", ""), _settings(group, replaced))
        for name, group in sorted(groups.items())
    ]
    values = {key: _values(key, options) for key in _keys(options)}
    within = [[row for _, row in group] for group in groups.values()]
    differing = {
        key: sorted(values[key], key=by_size) for key in values if _differs(key, options, within)
    }
    common = {key: next(iter(several)) for key, several in values.items() if len(several) == 1}
    implied = {key for key in differing if _is_of_some_parts(key, options)}
    notes = list(_notes(replaced, len(runs), len(runs) - len(readable)))
    return Plan(tasks, differing, implied, common, notes)


def _differs(key: str, options: Sequence[Options], tasks: Sequence[Sequence[Options]]) -> bool:
    """Whether runs of one task differ in this option, or tasks by it."""
    if key != "seed" and _follows_seed(key, options):
        return False
    if key in TASK:
        return len(_values(key, options)) > 1
    return any(len(_values(key, task)) > 1 for task in tasks)


def _notes(replaced: Sequence[tuple[Run, Run]], num_runs: int, num_lost: int) -> Iterator[str]:
    """What was left out, and why."""
    if replaced:
        older, newer = (", ".join(run.name for run in side) for side in zip(*replaced, strict=True))
        are = plural(len(replaced), "is", "are")
        yield f"{older} {are} left out: {newer} ran the same config and seed, and later"
    if num_lost:
        yield f"Without a readable config, so in no setting: {num_lost} of {num_runs} runs"


def _options(run: Run, by_source: bool) -> Options:
    options = {SOURCE: run.source} if by_source else {}
    options |= {key: show(value) for key, value in run.options.items() if key != SOURCE}
    if options.get(REPLAY, "null") != "null":
        # Each seed may replay its own recording, as in replay=outputs/a/seed=${seed}.
        options[REPLAY] = re.sub(rf"\bseed={run.seed}(?!\d)", "seed=${seed}", options[REPLAY])
        options = {
            key: value for key, value in options.items() if not key.startswith(UNUSED_BY_REPLAY)
        }
    return options


def _parts_as_typed(row: Options) -> Options:
    """A part with options of its own as one value, `{decoupled:{weight_cap:2}}`, as it is typed.

    As separate options they would be factors that are `(not set)` for runs with another part.
    """
    inside = {key: value for key, value in row.items() if key.startswith(f"{PART}.")}
    if not inside:
        return row
    options: dict[str, list[str]] = {}
    for key, value in inside.items():
        name, _, option = key.removeprefix(f"{PART}.").partition(".")
        options.setdefault(name, []).extend([f"{option}:{value}"] if option else [])
    text = ",".join(f"{name}:{{{','.join(texts)}}}" for name, texts in options.items())
    first = next(iter(inside))
    return {
        (PART if key == first else key): (f"{{{text}}}" if key == first else value)
        for key, value in row.items()
        if key == first or key not in inside
    }


def _kinds_as_one(options: Sequence[Options]) -> list[Options]:
    """Options with a `kind` as one value, `two_point(0, 16, 0.5)`, where runs differ in the kind.

    Each kind has options of its own, which others lack: as separate options they would be factors
    that are `(not set)` for most runs.
    """
    parents = [key.removesuffix(".kind") for key in _keys(options) if key.endswith(".kind")]
    mixed = [name for name in parents if len(_values(f"{name}.kind", options)) > 1]
    return [_joined(row, mixed) for row in options]


def _joined(row: Options, parents: Sequence[str]) -> Options:
    joined: Options = {}
    for key, value in row.items():
        parent = next((name for name in parents if key.startswith(f"{name}.")), None)
        if parent is None:
            joined[key] = value
        elif key == f"{parent}.kind":
            rest = [v for k, v in row.items() if k.startswith(f"{parent}.") and k != key]
            joined[parent] = f"{value}({', '.join(rest)})"
    return joined


def _values(key: str, options: Sequence[Options]) -> set[str]:
    return {row.get(key, MISSING) for row in options}


def _keys(options: Sequence[Options]) -> list[str]:
    """Every option of any run: sweeps first, then names of parts, then as stored."""

    def rank(key: str) -> tuple[bool, bool, int]:
        return key != SOURCE, "." not in key, FIRST.index(key) if key in FIRST else len(FIRST)

    return sorted(dict.fromkeys(key for row in options for key in row), key=rank)


def _settings(
    runs: Sequence[tuple[Run, Options]], replaced: list[tuple[Run, Run]]
) -> list[Setting]:
    every = [row for _, row in runs]
    keys = _telling(every)
    settings: dict[tuple[str, ...], Setting] = {}
    for run, row in sorted(runs, key=lambda pair: (pair[0].name, pair[0].seed or 0)):
        values = {key: row.get(key, MISSING) for key in keys}
        setting = settings.setdefault(tuple(values.values()), Setting(_label(values), values, row))
        setting.runs.append(run)
    for setting in settings.values():
        _pick_done(setting, replaced)
    sources = list(dict.fromkeys(row.get(SOURCE, "") for row in every))

    def place(setting: Setting) -> list[tuple[int, float, str]]:
        """Sweeps as they were named, everything else by its value."""
        return [
            (sources.index(value), 0.0, "") if key == SOURCE else by_size(value)
            for key, value in setting.values.items()
        ]

    return sorted(settings.values(), key=place)


def _telling(options: Sequence[Options]) -> list[str]:
    """The options that make up a setting's name: all in which the runs of a task differ."""
    return [
        key
        for key in _keys(options)
        if len(_values(key, options)) > 1
        and not _is_incidental(key)
        and not _follows_seed(key, options)
        and not _is_of_some_parts(key, options)
    ]


def _is_incidental(key: str) -> bool:
    if key == SOURCE:
        return False
    return key in (*INCIDENTAL, *SEEDS) or key.startswith(INCIDENTAL_GROUPS)


def _follows_seed(key: str, options: Sequence[Options]) -> bool:
    """Whether every run has its seed as the value, as with `env.kwargs.level_seed=${seed}`."""
    return key.endswith("seed") and all(row.get(key) == row.get("seed") for row in options)


def _is_of_some_parts(key: str, options: Sequence[Options]) -> bool:
    """Whether only some of a group's parts have this option, which all of them set alike.

    The part's own name says so already: where `sync=hogwild` has no `sync.zero_copy`, no setting
    needs to be called `zero_copy=(not set)`.
    """
    if len({row[key] for row in options if key in row}) > 1:
        return False
    return any(_tells(part, key, options) for part in (f"{key.split('.')[0]}.name", FRAMEWORK))


def _tells(part: str, key: str, options: Sequence[Options]) -> bool:
    """Whether no part has the option in one run and lacks it in another."""
    having = {row.get(part) for row in options if key in row}
    lacking = {row.get(part) for row in options if key not in row}
    return not having & lacking


def _label(values: Options) -> str:
    """A setting's name: parts by their names alone, other options as `option=value`."""
    last = {key: key.rsplit(".", 1)[-1] for key in values}
    count = Counter(last.values())
    words = [
        value
        if last[key] in ("name", "id") or key in (SOURCE, FRAMEWORK)
        else f"{last[key] if count[last[key]] == 1 else key}={value}"
        for key, value in values.items()
    ]
    return " · ".join(words) or "all runs"


def _pick_done(setting: Setting, replaced: list[tuple[Run, Run]]) -> None:
    """Of several finished runs of one seed the newest counts: a seed is one replication."""
    for run in sorted(setting.runs, key=lambda run: str(run.manifest.get("started") or "")):
        if not run.is_done or run.seed is None:
            continue
        if older := setting.done.get(run.seed):
            replaced.append((older, run))
        setting.done[run.seed] = run
    setting.done = dict(sorted(setting.done.items()))


def by_size(value: str) -> tuple[int, float, str]:
    """The order of values: numbers by size, then words."""
    try:
        number = float(value)
    except ValueError:
        number = math.inf
    return (0, number, value) if math.isfinite(number) else (1, 0.0, value)
