"""Whether two runs agree to the bit, and where they first differ."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from harness.files import flatten, parse_json, read_text
from harness.options.run import Config
from harness.run.checkpoints import CheckpointError, Checkpoints, State
from harness.run_directory import RunDir

MOST_BYTES = 1 << 30  # of metrics.jsonl
# What the clock and the machine decide, which two runs of one config need not share.
TIMES = re.compile(r"time.*|sync/.*_ms|system/.*|collector/(fps|wait_ms)")
# What an asynchronous run measures at moments that no schedule holds, or a replay alone has.
MOMENTS = re.compile(r"collector/(collected|dropped|in_flight)|sync/(link_.*|bytes.*)|sim/.*")


@dataclass(frozen=True)
class FirstDifference:
    """The first thing in which two runs differ."""

    what: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.what}: {self.first!r} there, {self.second!r} here"


def is_repeatable(config: Config) -> bool:
    """Whether the same seed promises the same bits: nothing depends on who is faster."""
    collector, policies = config.collector, config.collector.devices.policy
    return (
        (collector.simulates or not collector.asynchronous)
        and not (collector.preempts or collector.fills_replay_buffer)
        and config.sync.name != "hogwild"
        and {config.device, *(policies if isinstance(policies, list) else [policies])} == {"cpu"}
    )


def records(directory: Path) -> list[dict[str, Any]]:
    """The records of a run without their times; `ValueError` for one that is none."""
    records_ = []
    lines = read_text(directory / "metrics.jsonl", MOST_BYTES).splitlines()
    for number, line in enumerate(lines, 1):
        record = parse_json(line)
        if not isinstance(record, dict):
            raise ValueError(f"{directory / 'metrics.jsonl'}, line {number}: expected an object")
        records_.append({key: item for key, item in record.items() if not TIMES.fullmatch(key)})
    return records_


def unshared(
    first: Path, second: Path, *, replayed: bool = False, whole: bool = True
) -> tuple[set[str], set[str]]:
    """The metrics of which only the first run has records, and only the second.

    replayed, whole: as for `compare_records`. `ValueError` if they have no metric in common.
    """
    there, here = records(first), records(second)
    length = max(len(there), len(here)) if whole else min(len(there), len(here))
    a, b = ({key for record in run[:length] for key in record} - {"step"} for run in (there, here))
    if length and not a & b:
        raise ValueError(f"{first} and {second} have no metric in common")
    moments = {name for name in a | b if replayed and MOMENTS.fullmatch(name)}
    return a - b - moments, b - a - moments


def compare_records(
    first: Path,
    second: Path,
    *,
    replayed: bool = False,
    whole: bool = True,
    without: Collection[str] = (),
) -> FirstDifference | None:
    """The first metric that differs, by record and name.

    replayed: leave out what depends on moments. whole: as many records in both. without: metrics
    to leave out.
    """
    for there, here in zip_longest(records(first), records(second)):
        if not whole and (there is None or here is None):
            return None
        if there is None or here is None:
            step = (there or here or {}).get("step")
            there, here = (None if record is None else "a record" for record in (there, here))
            return FirstDifference(f"step {step}", there, here)
        for name in ["step", *sorted({*there, *here} - {"step"})]:
            a, b = there.get(name), here.get(name)
            if name in without or (replayed and MOMENTS.fullmatch(name)):
                continue
            if not _same(a, b):
                return FirstDifference(f"step {here.get('step')}, {name}", a, b)
    return None


def weights(directory: Path) -> State:
    """What the learner had learned at the newest checkpoint; `CheckpointError` without one."""
    _, state = Checkpoints(directory / "checkpoints", run=RunDir(directory).read_id()).load()
    learner = state.get("learner")
    if not isinstance(learner, dict):
        raise CheckpointError(f"{directory / 'checkpoints'}: the newest holds no learner")
    return learner


def compare_weights(first: Path, second: Path) -> FirstDifference | None:
    """The first weight, or state of the optimisers, that differs."""
    there, here = (dict(flatten(weights(run), lists=True)) for run in (first, second))
    for name in [*there, *(name for name in here if name not in there)]:
        a, b = there.get(name), here.get(name)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if (difference := _compare_tensors(name, a, b)) is not None:
                return difference
        elif isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or not _same(a, b):
            return FirstDifference(f"final weights, {name}", _shown(a), _shown(b))
    return None


def _compare_tensors(name: str, a: torch.Tensor, b: torch.Tensor) -> FirstDifference | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return FirstDifference(f"final weights, {name}", _shown(a), _shown(b))
    same = (a == b) | ((a != a) & (b != b))
    if bool(same.all()):
        return None
    place = tuple((~same).nonzero()[0].tolist())
    return FirstDifference(f"final weights, {name}{list(place)}", a[place].item(), b[place].item())


def _shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and a == b
