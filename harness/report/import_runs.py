"""Runs of other programs as runs of a report: a mapping of names says what their columns mean.

A mapping is YAML: one of presets/, or a person's own, which may start from a preset. `Mapping` has
its keys.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import suggest
from harness.files import MOST_BYTES_YAML, DamagedError, parse_yaml, read_text
from harness.report.log_files import READERS, STEP, TIME, Log, read_log
from harness.report.runs import FRAMEWORK, Run

PRESETS = {file.stem: file for file in sorted(Path(__file__).with_name("presets").glob("*.yaml"))}
COMPLETE = 0.95  # of total_frames: a run whose records reach this far has ended
MOST_SHOWN = 30  # columns in an error
SKIPPED = "_"  # a field of `path` that names nothing


@dataclass(frozen=True)
class Mapping:
    """What the names in a program's logs mean."""

    framework: str = ""  # the program's name, an option of its runs
    files: str = ""  # pattern of the files of runs below a directory; any format by default
    step: str = STEP  # the column that counts frames, or updates
    time: str = TIME  # the column with seconds, if there is one
    run: str = ""  # the column that names the run, in a table of several
    metrics: dict[str, str] = field(default_factory=dict)  # Lockstep's name → the column
    optional: dict[str, str] = field(default_factory=dict)  # the same, for columns that may lack
    options: dict[str, Any] = field(
        default_factory=dict
    )  # Lockstep's options, the same in all runs
    settings: dict[str, str] = field(default_factory=dict)  # its setting → Lockstep's option
    caution: str = ""  # what a reader of the verdict must know about these numbers
    ignore: list[str] = field(default_factory=list)  # patterns of settings that change nothing
    path: str = ""  # a run's name or the end of its path, as in `{env.id}/clip{algo.clip}/{seed}`


def read_mapping(source: str) -> Mapping:
    """A preset by its name, or the mapping in a YAML file."""
    if source in PRESETS:
        return _of_file(PRESETS[source])
    if not Path(source).exists():
        raise ValueError(f"--map is {source!r}: no such file, {suggest(source, PRESETS)}")
    return _of_file(Path(source))


def _of_file(file: Path) -> Mapping:
    try:
        values = parse_yaml(read_text(file, MOST_BYTES_YAML))
    except DamagedError as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds {type(values).__name__}, expected keys and values")
    base = Mapping()
    if (preset := values.pop("preset", None)) is not None:
        if preset not in PRESETS:
            raise ValueError(f"{file}: preset is {preset!r}; {suggest(str(preset), PRESETS)}")
        base = _of_file(PRESETS[preset])
    kinds = {one.name: type(getattr(base, one.name)) for one in fields(Mapping)}
    for key, value in values.items():
        if key not in kinds:
            raise ValueError(f"{file}: there is no key {key!r}; {suggest(str(key), kinds)}")
        if not isinstance(value, kinds[key]):
            raise ValueError(f"{file}: {key} is {value!r}, expected a {kinds[key].__name__}")
    merged = {
        key: getattr(base, key) | value if kinds[key] is dict else value
        for key, value in values.items()
    }
    return replace(base, **merged)


def import_runs(place: Path, mapping: Mapping) -> list[Run]:
    """The runs in a file, or in those below a directory."""
    files = _files(place, mapping)
    alone = Counter(file.parent for file in files)
    runs = [
        _to_run(log, file, place, mapping, alone[file.parent] == 1 and place.is_dir())
        for file in files
        for whole in read_log(file)
        for log in _split(whole, file, mapping)
    ]
    if not runs:
        raise ValueError(f"{place} holds no run")
    names: Counter[str] = Counter()
    for run in runs:  # W&B lets several have one name
        names[run.name] += 1
        run.name += f" ({names[run.name]})" if names[run.name] > 1 else ""
    return runs


def _files(place: Path, mapping: Mapping) -> list[Path]:
    """One file of each run: the first of those that are read together."""
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise ValueError(f"--import {place}: there is no such file or directory")
    patterns = [mapping.files] if mapping.files else list(READERS)
    files = sorted({file for pattern in patterns for file in place.rglob(pattern)})
    files = [file for file in files if file.is_file() and not file.is_symlink()]
    if not files:
        raise ValueError(f"{place} holds no file like {' or '.join(patterns)}")
    # The event files of one directory are one run.
    together = {file.parent if "tfevents" in file.name else file: file for file in files}
    return list(together.values())


def _split(log: Log, file: Path, mapping: Mapping) -> Iterator[Log]:
    """The runs of a table that has several."""
    if not mapping.run:
        yield log
        return
    for name, rows in log.table.groupby(_column(mapping.run, "run", log.table, file)):
        yield replace(log, name=str(name), table=rows)


def _to_run(log: Log, file: Path, place: Path, mapping: Mapping, is_alone: bool) -> Run:
    """The log of a file, which is the only one of its directory or one of several."""
    name = log.name or str(file.parent if is_alone else file.with_suffix(""))
    options = _options(log, name, file, mapping)
    seed = options.get("seed")
    run = Run(
        name=f"{place.name}/{name.removeprefix(str(place)).strip('/')}".rstrip("/"),
        source=place.name,
        state="failed" if log.error else "done",
        error=log.error,
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
        options=options,
        problems=[*log.problems],
        caution=mapping.caution,
    )
    if run.seed is None:
        run.problems.append("its seed is not known: name it in `path`, `settings` or `options`")
    run.records = _records(log.table, file, mapping)
    run.summary = _summary(run.records)
    total, last = options.get("total_frames"), _last_step(log.table, file, mapping)
    if isinstance(total, int | float) and last < COMPLETE * total and not run.error:
        run.state, run.error = "interrupted", f"its records end at {last:g} of {total:g} frames"
    return run


def _options(log: Log, name: str, file: Path, mapping: Mapping) -> dict[str, Any]:
    """By Lockstep's names where the mapping has one, else by the program's own."""
    logged = {
        mapping.settings.get(key, key): value
        for key, value in log.settings.items()
        if not any(fnmatchcase(key, pattern) for pattern in mapping.ignore)
    }
    framework = {FRAMEWORK: mapping.framework} if mapping.framework else {}
    return framework | _of_path(name, file, mapping) | logged | mapping.options


def _of_path(name: str, file: Path, mapping: Mapping) -> dict[str, Any]:
    """What a run's name, or the end of its path, says by the template `path`."""
    if not mapping.path:
        return {}
    parts = re.split(r"\{([^{}]+)\}", mapping.path)
    names = parts[1::2]
    groups = [re.escape(text) if n % 2 == 0 else r"([^/]+?)" for n, text in enumerate(parts)]
    match = re.search(rf"(?:^|/){''.join(groups)}$", name)
    if match is None:
        raise ValueError(
            f"{file}: the run's name {name!r} does not end like path, {mapping.path!r}"
        )
    texts = zip(names, match.groups(), strict=True)
    return {key: _value(text) for key, text in texts if key != SKIPPED}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _records(table: pd.DataFrame, file: Path, mapping: Mapping) -> pd.DataFrame:
    """The columns that have a meaning, by Lockstep's names, steps ascending."""
    columns = {STEP: _column(mapping.step, STEP, table, file)}
    columns |= {name: _column(at, name, table, file) for name, at in mapping.metrics.items()}
    for name, at in {TIME: mapping.time, **mapping.optional}.items():
        if matching := _matching(at, table):
            columns[name] = matching[0]
    records = pd.DataFrame(
        {name: pd.to_numeric(table[column], errors="coerce") for name, column in columns.items()}
    )
    records = records.replace([math.inf, -math.inf], math.nan)
    records = records.dropna(subset=[STEP]).astype(float)
    if not len(records):
        raise ValueError(f"{file}: its column {columns[STEP]} holds no number")
    return records.sort_values(STEP, kind="stable", ignore_index=True)


def _last_step(table: pd.DataFrame, file: Path, mapping: Mapping) -> float:
    steps = table[_column(mapping.step, STEP, table, file)]
    return float(pd.to_numeric(steps, errors="coerce").max())


def _column(pattern: str, meaning: str, table: pd.DataFrame, file: Path) -> str:
    """The column of this name, or the only one like this pattern."""
    matching = _matching(pattern, table)
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(f"{file}: {meaning} may be {' or '.join(matching)}; name one of them")
    names = [str(name) for name in table]
    shown = ", ".join(names[:MOST_SHOWN]) + (", ..." if len(names) > MOST_SHOWN else "")
    raise ValueError(f"{file} has no column {pattern}, which is {meaning}; it has {shown}")


def _matching(pattern: str, table: pd.DataFrame) -> list[str]:
    if pattern in table:
        return [pattern]
    return [name for name in map(str, table) if fnmatchcase(name, pattern)]


def _summary(records: pd.DataFrame) -> dict[str, float]:
    """The mean over a metric's records; of a maximum the largest, of a return the last one."""
    numbers = {}
    for name in records.columns.difference([STEP, TIME]):
        values = records[name].dropna()
        if len(values):
            numbers[name] = float(_one_number(name)(values))
    return numbers


def _one_number(name: str) -> Callable[[pd.Series], float]:
    if name.endswith("_max"):
        return pd.Series.max
    if name.endswith("dropped"):  # a count of each record
        return pd.Series.sum
    if name.endswith("/return"):
        return lambda values: values.iloc[-1]
    return pd.Series.mean


def import_all(places: Sequence[Path], sources: Sequence[str]) -> list[Run]:
    """The runs of every `--import`, with its `--map`; one map may serve all."""
    if len(sources) not in (1, len(places)):
        raise ValueError(
            f"--import is given {len(places)} times and --map {len(sources)} times, expected one "
            f"--map for all or for each: a YAML file, or {', '.join(PRESETS)}"
        )
    mappings = [read_mapping(source) for source in sources] * (len(places) // len(sources))
    return [
        run
        for place, mapping in zip(places, mappings, strict=True)
        for run in import_runs(place, mapping)
    ]
