"""Run directories as two tables: a row for each run, and a row for each of their records.

runs       numbered from 0. The columns are the fields of `Run` without its summary and records;
           `frames`, of its last record; and `summary.<name>` for each number of a summary. Numbers
           are NaN for runs that lack them.
records    `run`, the number of the run; `step`, the frames so far; and each metric that was asked
           for, NaN where a record lacks it. Runs come in order, and the steps of a run ascend.

Nothing in a run directory is trusted: files are parsed as JSON and plain YAML within limits of
size; nothing is unpickled, resolved or executed. What cannot be read is noted in the run's
`problems`, and the rest is used.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from harness.files import (
    MOST_BYTES,
    MOST_BYTES_YAML,
    DamagedError,
    flatten,
    is_alive,
    parse_json,
    parse_yaml,
    read_text,
)
from harness.report.text import show_progress

FILES = ("status.json", "config.yaml", "metrics.jsonl", "summary.json", "manifest.json")
UNFINISHED = ("running", "failed", "interrupted", "pruned")  # may lack records and a summary
STATES = ("done", *UNFINISHED)
MOST_GAPS = 10  # times as many frames between two records as the options say: some are lost
MOST_BYTES_METRICS = 1 << 30
MOST_RECORDS = 2_000_000
FRAMEWORK, OURS = "framework", "Lockstep"  # an option of runs beside those of other programs
MARK = "report.html"  # a folder that holds one is a report and not a run


@dataclass
class Run:
    """What is known of one run."""

    name: str  # in the report: the path below the directory that was named
    source: str  # the directory that was named
    state: str = "unknown"  # or one of STATES
    error: str = ""
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # by dotted names; lists as text
    manifest: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    damage: str = ""  # why it cannot be in a statistic although it finished
    caution: str = ""  # what a reader of the verdict must know about its numbers
    summary: dict[str, float] = field(default_factory=dict)
    records: pd.DataFrame = field(default_factory=lambda: pd.DataFrame({"step": []}, dtype=float))


COLUMNS = [one.name for one in fields(Run) if one.name not in ("summary", "records")]


class Tables(NamedTuple):
    """Runs and their records; the module's docstring has the columns."""

    runs: pd.DataFrame
    records: pd.DataFrame


def to_tables(runs: Sequence[Run]) -> Tables:
    """One row for each run, and the records of all."""
    rows = pd.DataFrame([[getattr(run, name) for name in COLUMNS] for run in runs], dtype=object)
    numbers = [
        {"frames": run.records["step"].max()}
        | {f"summary.{name}": value for name, value in run.summary.items()}
        for run in runs
    ]
    records = [run.records.assign(run=number) for number, run in enumerate(runs)]
    return Tables(
        rows.set_axis(COLUMNS, axis=1).join(pd.DataFrame(numbers, dtype=float)),
        pd.concat(records, ignore_index=True),
    )


def read_runs(
    places: Sequence[Path], wanted: Collection[str] | None, imported: Sequence[Run] = ()
) -> Tables:
    """All runs in the directories named, in a fixed order; a `ValueError` if there is none.

    wanted: the metrics that are read of their records; None for all.
    imported: runs of other programs, which follow.
    """
    runs = _read_places(places, wanted)
    if imported:
        for run in runs:
            run.options = {FRAMEWORK: OURS} | run.options
    return to_tables([*runs, *imported])


def _read_places(places: Sequence[Path], wanted: Collection[str] | None) -> list[Run]:
    directories: dict[Path, tuple[Path, Path]] = {}
    for place in places:
        if not place.is_dir():
            kind = "no directory" if place.exists() else "not there"
            raise ValueError(f"{place} is {kind}, expected a run's or a sweep's directory")
        for directory in search(place):
            directories.setdefault(directory.resolve(), (place, directory))
    if places and not directories:
        listed = ", ".join(str(place) for place in places)
        raise ValueError(f"no run in {listed}: a run directory has {FILES[0]} or {FILES[1]}")
    sources = {place: place.resolve().name or "runs" for place in places}
    if len(set(sources.values())) < len(sources):
        sources = {place: str(place) for place in places}
    runs = []
    for number, (place, directory) in enumerate(directories.values(), 1):
        show_progress(f"reading {number}/{len(directories)}: {directory.name}")
        source, inside = sources[place], directory.relative_to(place).as_posix()
        # A path need not be UTF-8; what is not cannot be written.
        name, source = (
            text.encode(errors="replace").decode()
            for text in (source if inside == "." else f"{source}/{inside}", source)
        )
        runs.append(read_run(directory, wanted, name=name, source=source))
    return runs


def search(place: Path) -> Iterator[Path]:
    """Run directories at and below a place, and the empty folders beside them: lost runs."""
    if is_run(place):
        yield place
        return
    try:
        children = [path for path in sorted(place.iterdir()) if _is_place(path)]
    except OSError:  # a folder without the permission to list it
        return
    below = {child: list(search(child)) for child in children}
    beside_runs = any(is_run(child) for child in children)
    for child, runs in below.items():
        yield from runs or ([child] if beside_runs else [])


def is_run(directory: Path) -> bool:
    """Whether it holds one of the files of a run."""
    return any(os.path.isfile(directory / name) for name in FILES)


def _is_place(path: Path) -> bool:
    hidden = path.name.startswith(".") or path.is_symlink()
    return not hidden and path.is_dir() and not (path / MARK).exists()


def read_run(directory: Path, wanted: Collection[str] | None, *, name: str, source: str) -> Run:
    """What can be read of a run; of its records the `wanted` metrics, or all."""
    run = Run(name, source)
    if not any((directory / file).exists() for file in FILES):
        run.problems.append("it has no file of a run")
        return run
    run.manifest = _read_mapping(run, directory / "manifest.json")
    _take_status(run, _read_mapping(run, directory / "status.json"))
    config = _read_mapping(run, directory / "config.yaml")
    run.options = {
        key: f"[{', '.join(map(str, value))}]" if isinstance(value, list) else value
        for key, value in (flatten(config, lists=False) if config else ())
    }
    seed = run.options.get("seed", run.manifest.get("seed"))
    run.seed = seed if isinstance(seed, int) and not isinstance(seed, bool) else None
    if run.seed is None:
        run.problems.append("its seed is not known")
    if run.state != "running":  # its summary would be of the part before it was resumed
        summary = _read_mapping(run, directory / "summary.json")
        numbers = {name: _number(value) for name, value in summary.items()}
        run.summary = {name: number for name, number in numbers.items() if not math.isnan(number)}
    run.records, damaged = _read_records(run, directory / "metrics.jsonl", wanted)
    run.damage = _damage(run, damaged) if run.state == "done" else ""
    return run


def _damage(run: Run, damaged: str) -> str:
    """Why the records of a finished run are not all there; empty if they are, as far as is known.

    damaged: what is wrong with lines of it.
    """
    steps = run.records["step"].to_numpy()
    if not len(steps):
        lost = [text for text in run.problems if text.startswith("metrics.jsonl")]
        return lost[0] if lost else "metrics.jsonl holds no record"
    end = run.summary.get("frames", _number(run.options.get("total_frames")))
    if steps[-1] < end:
        return f"metrics.jsonl ends at frame {steps[-1]:.0f} of {end:.0f}"
    usual = _number(run.options.get("log_every_frames"))
    usual += _number(run.options.get("collector.frames_per_batch"))
    gaps = np.diff(steps, prepend=0.0)
    if gaps.max() > MOST_GAPS * usual:
        after = steps[gaps.argmax()]
        return f"metrics.jsonl has no record of frames {after - gaps.max():.0f} to {after:.0f}"
    return damaged


def _take_status(run: Run, status: dict[str, Any]) -> None:
    state = status.get("state")
    run.error = str(status.get("error") or "")
    if not status:
        return
    if state not in STATES:
        run.problems.append(f"status.json: state is {state!r}, expected one of {', '.join(STATES)}")
        return
    run.state = str(state)
    here = run.manifest.get("host") in (None, socket.gethostname())
    if state == "running" and here and not is_alive(status.get("pid")):
        run.state = "interrupted"
        run.error = "its process is gone and reported no reason"


def _read_text(run: Run, file: Path, most: int) -> str:
    """The text of an ordinary file; empty, with the problem noted, if there is none."""
    try:
        text = read_text(file, most)
    except FileNotFoundError:
        if run.state not in UNFINISHED or file.name != "summary.json":
            run.problems.append(f"{file.name} is missing")
        return ""
    except ValueError as error:
        run.problems.append(str(error).replace(str(file), file.name))
        return ""
    except OSError as error:
        run.problems.append(f"{file.name} cannot be read: {error.strerror}")
        return ""
    if not text and (run.state not in UNFINISHED or file.name != "metrics.jsonl"):
        run.problems.append(f"{file.name} is empty")
    return text


def _read_mapping(run: Run, file: Path) -> dict[str, Any]:
    """What a JSON or YAML file holds; empty, with the problem noted, if that is no mapping."""
    parse: Callable[[str], Any] = parse_json
    most, expected = MOST_BYTES, "an object"
    if file.suffix == ".yaml":
        parse, most, expected = parse_yaml, MOST_BYTES_YAML, "options"
    text = _read_text(run, file, most)
    if not text:
        return {}
    try:
        value = parse(text)
    except DamagedError as error:
        run.problems.append(f"{file.name} is damaged: {error}")
        return {}
    if isinstance(value, dict):
        return value
    run.problems.append(f"{file.name} holds {type(value).__name__}, expected {expected}")
    return {}


def _read_records(run: Run, file: Path, wanted: Collection[str] | None) -> tuple[pd.DataFrame, str]:
    """The records as a table, frames ascending; and what is wrong with lines before the last."""
    names = None if wanted is None else ["step", *sorted({*wanted} - {"step"})]
    records: list[list[float] | dict[str, float]] = []
    damaged, is_last = 0, False
    text = _read_text(run, file, MOST_BYTES_METRICS)
    for line in io.StringIO(text):
        record = _record(line, names)
        if record is None:
            damaged += bool(line.strip())
            is_last = True
        elif len(records) < MOST_RECORDS:
            records.append(record)
            is_last = False
    problem = f"metrics.jsonl: {damaged} damaged lines were left out" if damaged else ""
    if damaged:
        run.problems.append(problem)
    elif text and not records:
        run.problems.append("metrics.jsonl holds no record")
    if len(records) == MOST_RECORDS:
        run.problems.append(f"metrics.jsonl: records beyond {MOST_RECORDS} were left out")
    columns = names if names is not None or records else ["step"]
    table = pd.DataFrame(records, columns=columns, dtype=float)
    table = table.sort_values("step", kind="stable", ignore_index=True)
    return table, "" if damaged == 1 and is_last else problem


def _record(line: str, names: Sequence[str] | None) -> list[float] | dict[str, float] | None:
    """The numbers of these names, of which the first is the step; or all, by their names."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not _number(value.get("step")) >= 0:
        return None
    if names is None:
        numbers = {name: _number(one) for name, one in value.items()}
        return {name: one for name, one in numbers.items() if not math.isnan(one)}
    return [_number(value.get(name)) for name in names]


def _number(value: object) -> float:
    """A finite number as it is, anything else as NaN; a flag is no number."""
    if type(value) is float or type(value) is int:
        try:
            return float(value) if math.isfinite(value) else math.nan
        except OverflowError:
            return math.nan
    return math.nan
