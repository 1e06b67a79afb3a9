"""Runs sorted into tasks and settings by the options in which they differ."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from harness.errors import show
from harness.numbers import plural
from harness.report.runs import FRAMEWORK

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
LINKED = {"algo.max_lag": "sync.max_lag", "algo.on_stale": "sync.on_stale"}
FIRST = ("sync.name", "collector.name", "algo.name", "env.id", "model.name")
# The recorded schedule stands in place of these.
UNUSED_BY_REPLAY = ("collector.costs.", "collector.network.", "collector.failures")
PART = "algo.objective"  # a part within a group: its name, or its name with options
REPLAY = "collector.replay"
TASK = ["algo.name", "env.id"]
MISSING = "(not set)"

Options = dict[str, str]  # of one run, by dotted names
Factor = tuple[str, ...]  # names of options that are varied together


@dataclass
class Plan:
    """All runs, by task and setting.

    A task is an algorithm in an environment: scores are compared within it only. A setting is the
    runs of a task that differ in nothing but their seed.

    runs      as they were read, with `task` and `setting`, which are empty for runs without
              options, and `counts`: whether the run is behind the statistics
    settings  the options of each (task, setting), in the order of the report
    """

    runs: pd.DataFrame
    settings: pd.DataFrame
    names: dict[str, list[str]]  # by task: the options that distinguish its settings
    differing: dict[str, list[str]]  # option → its values, if it differs within a task
    implied: set[str]  # those of them that only some parts have, which all of them set alike
    common: Options  # those that are the same everywhere
    notes: list[str]  # what was left out, and why
    damaged: dict[str, str] = field(default_factory=dict)  # runs left out → what is wrong with them

    @property
    def tasks(self) -> list[str]:
        return list(self.names)

    def labels(self, task: str) -> list[str]:
        """The settings of a task."""
        return list(self.settings.loc[task].index)

    def counted(self, task: str) -> pd.DataFrame:
        """The runs behind the statistics: one for each setting and seed, in this order."""
        runs = self.runs[self.runs["counts"] & (self.runs["task"] == task)]
        places = {label: place for place, label in enumerate(self.labels(task))}
        keys = zip(runs["setting"].map(places), runs["seed"], runs.index, strict=True)
        return runs.loc[[run for *_, run in sorted(keys)]]


def arrange(runs: pd.DataFrame, *, by_source: bool = False) -> Plan:
    """Sort runs into tasks and settings. `by_source` keeps the directories named apart."""
    readable = runs[runs["options"].map(bool)]
    rows = [_parts_as_typed(_options(run, by_source)) for run in readable.itertuples()]
    by_run = pd.Series(_kinds_as_one(rows), readable.index, dtype=object)
    # NaN for runs that lack an option
    options = pd.DataFrame(list(by_run), readable.index, _keys(by_run), dtype=object)
    values = options.where(options.notna(), MISSING)
    task = pd.Series(map(" on ".join, values_of(values, TASK)), options.index, dtype=object)
    within = {name: rows[_keys(by_run[rows.index])] for name, rows in options.groupby(task)}
    names = {name: _distinguishing(group) for name, group in within.items()}
    labels = {
        run: _label(names[name], row)
        for name, rows in within.items()
        for run, row in zip(rows.index, values_of(values.loc[rows.index], names[name]), strict=True)
    }
    runs = runs.assign(task=task, setting=pd.Series(labels, dtype=object))
    runs = runs.fillna({"task": "", "setting": ""})
    counts, notes = _count(runs)
    is_damaged = _is_finished(runs) & (runs["damage"] != "")
    notes += [text for text in runs["caution"].unique() if text]
    notes += _only_of_one_program(values, task)
    texts = {key: values[key].unique() for key in values}
    differing = {
        key: sorted(texts[key], key=by_size)
        for key in texts
        if _differs(key, options, list(within.values()))
    }
    if lost := len(runs) - len(readable):
        notes.append(f"Without a readable config, so in no setting: {lost} of {len(runs)} runs")
    return Plan(
        runs.assign(counts=counts),
        _settings(runs, values, names),
        names,
        differing,
        implied={key for key in differing if _is_of_some_parts(key, options)},
        common={key: several[0] for key, several in texts.items() if len(several) == 1},
        notes=notes,
        damaged=dict(runs.loc[is_damaged, ["name", "damage"]].itertuples(index=False)),
    )


def _differs(key: str, options: pd.DataFrame, tasks: Sequence[pd.DataFrame]) -> bool:
    """Whether runs of one task differ in this option, or tasks by it."""
    if _follows(key, options):
        return False
    groups = [options] if key in TASK else [rows for rows in tasks if key in rows]
    return any(_varies(key, rows) for rows in groups)


def _varies(key: str, options: pd.DataFrame) -> bool:
    return bool(options[key].nunique(dropna=False) > 1)


def _options(run: Any, by_source: bool) -> Options:
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
    kinds = dict.fromkeys(key for row in options for key in row if key.endswith(".kind"))
    mixed = [
        key.removesuffix(".kind") for key in kinds if len({row.get(key) for row in options}) > 1
    ]
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


def _keys(rows: Iterable[Options]) -> list[str]:
    """Every option of any run: sweeps first, then names of parts, then as stored."""

    def rank(key: str) -> tuple[bool, bool, int]:
        return key != SOURCE, "." not in key, FIRST.index(key) if key in FIRST else len(FIRST)

    return sorted(dict.fromkeys(key for row in rows for key in row), key=rank)


def _distinguishing(options: pd.DataFrame) -> list[str]:
    """The options that make up a setting's name: all in which the runs of a task differ."""
    return [
        key
        for key in options
        if _varies(key, options)
        and not _is_incidental(key)
        and not _follows(key, options)
        and not _is_of_some_parts(key, options)
    ]


def _is_incidental(key: str) -> bool:
    if key == SOURCE:
        return False
    return key in (*INCIDENTAL, *SEEDS) or key.startswith(INCIDENTAL_GROUPS)


def _follows(key: str, options: pd.DataFrame) -> bool:
    """Whether every run that has this option has the value of another one, which sets it.

    So do `algo.max_lag`, whose default is `${sync.max_lag}`, and `env.kwargs.level_seed=${seed}`.
    """
    other = LINKED.get(key, "seed" if key.endswith("seed") else None)
    if other in (None, key) or other not in options:
        return False
    return bool((options[key] == options[other])[options[key].notna()].all())


def _is_of_some_parts(key: str, options: pd.DataFrame) -> bool:
    """Whether only some of a group's parts have this option, which all of them set alike.

    The part's own name says so already: where `sync=hogwild` has no `sync.zero_copy`, no setting
    needs to be called `zero_copy=(not set)`.
    """
    if options[key].nunique() > 1:
        return False
    return any(_tells(part, key, options) for part in (f"{key.split('.')[0]}.name", FRAMEWORK))


def _tells(part: str, key: str, options: pd.DataFrame) -> bool:
    """Whether no part has the option in one run and lacks it in another."""
    has = options[key].notna()
    parts = options[part] if part in options else pd.Series("", options.index)
    return not set(parts[has]) & set(parts[~has])


def values_of(options: pd.DataFrame, keys: Sequence[str]) -> list[tuple[str, ...]]:
    """The values of these options in each row."""
    rows = options.reindex(columns=list(keys), fill_value=MISSING)
    return [tuple(row) for row in rows.to_numpy()]


def _label(names: Sequence[str], values: Sequence[str]) -> str:
    """A setting's name: parts by their names alone, other options as `option=value`."""
    last = {key: key.rsplit(".", 1)[-1] for key in names}
    count = Counter(last.values())
    words = [
        value
        if last[key] in ("name", "id") or key in (SOURCE, FRAMEWORK)
        else f"{last[key] if count[last[key]] == 1 else key}={value}"
        for key, value in zip(names, values, strict=True)
    ]
    return " · ".join(words) or "all runs"


def _only_of_one_program(values: pd.DataFrame, task: pd.Series) -> list[str]:
    """Tasks that some programs have no runs of, although others have: their names may differ."""
    if FRAMEWORK not in values or values[FRAMEWORK].nunique() < 2:
        return []
    programs = values[FRAMEWORK].groupby(task).unique()
    return [
        f"Not compared with other programs: {name} has runs of {', '.join(of)} alone. Scores are "
        f"compared within {' and '.join(TASK)}, which `options` of --map can name."
        for name, of in programs.items()
        if len(of) == 1
    ]


def _is_finished(runs: pd.DataFrame) -> pd.Series:
    return (runs["state"] == "done") & runs["seed"].notna() & (runs["task"] != "")


def _count(runs: pd.DataFrame) -> tuple[pd.Series, list[str]]:
    """Which runs count: of several finished runs of one seed the newest, as it is one replication.

    Which others are left out comes in words.
    """
    done = runs[_is_finished(runs) & (runs["damage"] == "")]
    started = [str(manifest.get("started") or "") for manifest in done["manifest"]]
    done = done.assign(started=started).sort_values(["task", "setting", "started", "name"])
    newer = done.groupby(["task", "setting", "seed"])["name"].shift(-1).dropna().sort_index()
    counts = pd.Series(runs.index.isin(done.index.difference(newer.index)), runs.index)
    if newer.empty:
        return counts, []
    older = runs.loc[newer.index, "name"]
    are = plural(len(older), "is", "are")
    later = ", and later" if all(done.loc[newer.index, "started"]) else ""
    return counts, [
        f"{', '.join(older)} {are} left out: {', '.join(newer)} ran the same config and seed{later}"
    ]


def _settings(
    runs: pd.DataFrame, values: pd.DataFrame, names: dict[str, list[str]]
) -> pd.DataFrame:
    """The options of the first run of each setting. Settings are sorted by their values."""
    sources = list(dict.fromkeys(runs["source"]))

    def place(run: int) -> list[tuple[int, float, str]]:
        """Sweeps as they were named, everything else by its value."""
        return [
            (sources.index(value), 0.0, "") if key == SOURCE else by_size(value)
            for key, value in values.loc[run, names[runs.at[run, "task"]]].items()
        ]

    ordered = runs.loc[values.index].sort_values("name", kind="stable")
    firsts = ordered.drop_duplicates(["task", "setting"]).index
    tasks = list(names)
    rows = sorted(firsts, key=lambda run: (tasks.index(runs.at[run, "task"]), place(run)))
    keys = runs.loc[rows, ["task", "setting"]]
    return values.loc[rows].set_index(pd.MultiIndex.from_frame(keys))


def by_size(value: str) -> tuple[int, float, str]:
    """The order of values: numbers by size, then words."""
    try:
        number = float(value)
    except ValueError:
        number = math.inf
    return (0, number, value) if math.isfinite(number) else (1, 0.0, value)
