"""Log files of other programs, each run as its settings and a table with a column for each metric.

`read_log` knows a format by the name of the file:

    events.out.tfevents.*     TensorBoard: the event files of one directory are one run
    *.csv                     a column for each metric; or W&B's export of a chart, which holds
                              several runs; or a metric of TorchRL's CSVLogger: files of one run
    *.json, *.jsonl           an object a line; nested ones are flattened with `/`

Nothing in a file is trusted: it is parsed within limits of size, and nothing in it is executed.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import require
from harness.files import DamagedError, check_ordinary, parse_yaml, read_text

MOST_BYTES = 1 << 30
STEP, TIME = "step", "time"  # columns that a format has by itself; seconds
HYPERPARAMETERS = (
    "hyperparameters",
    "hparams",
)  # text that SummaryWriters are given: `|name|value|`
EXTREMES = ("__MIN", "__MAX")  # columns of W&B's export beside each metric


@dataclass
class Log:
    """What one run logged."""

    name: str  # of the run, if the file names it
    table: pd.DataFrame  # a row for each record, NaN where it lacks a metric
    settings: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # how it ended, if the file says that it did not end well
    problems: list[str] = field(default_factory=list)  # what could not be read


def read_log(file: Path) -> list[Log]:
    """The runs in a file; a `ValueError` says what is wrong with it."""
    if file.suffix == ".wandb":
        raise ValueError(
            f"{file} is W&B's own format, which only W&B reads: export the run's history as CSV"
        )
    reader = next((read for name, read in READERS.items() if file.match(name)), None)
    if reader is None:
        raise ValueError(f"{file} is of no format that is read: {', '.join(READERS)}")
    check_ordinary(file, MOST_BYTES)
    return reader(file)


# -- tables


def _read_csv(file: Path) -> list[Log]:
    text = read_text(file, MOST_BYTES)
    if file.parent.name == "scalars" or "scalars" in file.parts[-4:-1]:
        return [_read_torchrl(file)]
    header = next(csv.reader(io.StringIO(text)), [])
    exported = [name for name in header if f"{name}{EXTREMES[0]}" in header and " - " in name]
    names = {"names": range(len(header)), "header": 0} if exported else {}
    try:
        table = pd.read_csv(io.StringIO(text), low_memory=False, **names)
    except ValueError as error:  # pandas' own errors among them
        raise ValueError(f"{file} is no table: {error}") from None
    return list(_chart_export(table, header, exported)) if exported else [Log("", table)]


def _chart_export(table: pd.DataFrame, header: list[str], exported: list[str]) -> Iterator[Log]:
    """The runs in W&B's export of a chart, whose columns are called `run - metric`.

    W&B lets several runs have one name: then a name stands there more than once.
    table: its columns are numbered, in the order of the header.
    """
    runs: dict[tuple[str, int], dict[int, str]] = {}  # name and which of it → column → metric
    for place, name in enumerate(header):
        if name in exported:
            run, _, metric = name.rpartition(" - ")
            runs.setdefault((run, header[:place].count(name)), {})[place] = metric
    for (run, _), metrics in runs.items():
        rows = table[[0, *metrics]].rename(columns={0: STEP} | metrics)
        yield Log(run, rows.dropna(subset=list(metrics.values()), how="all"))


def _read_torchrl(file: Path) -> Log:
    """A run of TorchRL's CSVLogger: `scalars/<metric>.csv`, each with steps and values."""
    folder = next(parent for parent in file.parents if parent.name == "scalars")
    columns = []
    for metric in sorted(folder.rglob("*.csv")):
        name = metric.relative_to(folder).with_suffix("").as_posix()
        text = read_text(metric, MOST_BYTES)
        columns.append(pd.read_csv(io.StringIO(text), names=[STEP, name], header=None))
    settings: dict[str, Any] = {}
    for place in sorted(folder.parent.glob("texts/hparams*.txt")):
        lines = (line.partition(":") for line in read_text(place).splitlines())
        settings |= {name.strip(): _plain(value.strip()) for name, _, value in lines}
    return Log(folder.parent.name, _by_step(columns), settings)


def _read_json(file: Path) -> list[Log]:
    lines = read_text(file, MOST_BYTES).splitlines()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and rows:
                problems.append(f"{file.name}: its last line is cut off and was left out")
                continue
            raise ValueError(f"{file}, line {number}: not JSON") from None
        if not isinstance(row, dict):
            raise ValueError(f"{file}, line {number}: {type(row).__name__}, expected an object")
        rows.append(dict(_flat(row)))
    return [Log("", pd.DataFrame(rows), problems=problems)]


# -- TensorBoard


def _read_tensorboard(file: Path) -> list[Log]:
    require("reading TensorBoard's files", "tensorboard", "tensorboard")
    from tensorboard.backend.event_processing import event_accumulator

    everything = {"scalars": 0, "tensors": 0}  # by default a sample is kept
    events = event_accumulator.EventAccumulator(str(file.parent), size_guidance=everything)
    events.Reload()
    tags = events.Tags()
    columns = []
    for tag in tags["scalars"]:
        rows = [(event.step, event.wall_time, event.value) for event in events.Scalars(tag)]
        columns.append(pd.DataFrame(rows, columns=[STEP, TIME, tag]))
    settings: dict[str, Any] = {}
    for tag in tags["tensors"]:
        if tag.split("/")[0] in HYPERPARAMETERS:
            for event in events.Tensors(tag):
                for value in event.tensor_proto.string_val:
                    settings |= _of_markdown(value.decode(errors="replace"))
    return [Log(file.parent.name, _by_step(columns), settings)]


def _of_markdown(text: str) -> dict[str, Any]:
    """The rows of a table of names and values."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if "|" in line]
    return {row[0].strip(): _plain(row[1].strip()) for row in rows[2:] if len(row) == 2}


# -- what they share


def _by_step(columns: list[pd.DataFrame]) -> pd.DataFrame:
    """Metrics with steps of their own as one table; of several values at a step, the mean."""
    if not columns:
        return pd.DataFrame({STEP: []})
    return pd.concat(columns).groupby(STEP, as_index=False).mean()


def _flat(value: Mapping[str, Any], sign: str = "/", at: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, sign, f"{at}{name}{sign}")
        else:
            yield f"{at}{name}", inner


def _plain(text: str) -> Any:
    """The number or flag that a text stands for, or the text."""
    if text == "None":  # as Python writes it
        return None
    try:
        value = parse_yaml(text)
    except DamagedError:
        return text
    unusual = isinstance(value, float) and not math.isfinite(value)
    return text if unusual or not isinstance(value, bool | int | float | None) else value


READERS: dict[str, Callable[[Path], list[Log]]] = {
    "*tfevents*": _read_tensorboard,
    "*.csv": _read_csv,
    "*.jsonl": _read_json,
    "*.json": _read_json,
}
