"""Traces of what other programs record, as far as their files have it.

Each function yields the events of a directory. What a program does not record is either left out,
and the rules that need it are not checked; or it follows from what is recorded, and the first line
of the trace names it as `inferred`, so that no rule holds by construction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep_check.events import FORMAT, Event, TraceError

Record = dict[str, Any]


def tinker_cookbook(directory: Path) -> Iterator[Event]:
    """The rollout summaries of tinker-cookbook: `rollout_json_export=True`, schema version 1.

    A line is a trajectory that an iteration trained on, with the step of the client that sampled
    it. Trajectories have no number of their own, and what was filtered out is not in the files.
    """
    yield _head("tinker-cookbook", inferred="publish act")
    version, sample = -1, 0
    for iteration, path in _numbered(directory, "iteration_*/train_rollout_summaries.jsonl"):
        yield from _publish(version, iteration)
        version = max(version, iteration)
        for line, record in _records(path):
            acted = record.get("sampling_client_step")
            place = {"worker": 0, "sample": sample}
            sample += 1
            if acted is not None:
                length = sum(step["ac_len"] for step in _get(record, "steps", path, line))
                yield {"event": "act", **place, "version": acted, "length": length}
                yield {"event": "train", **place, "update": iteration + 1}


def prime_rl(directory: Path) -> Iterator[Event]:
    """The episodes of prime-rl: `rollouts/step_*/train/{all,effective}/traces.jsonl`.

    `all` has what arrived while a batch was collected, and `effective` what was trained on. An
    episode has the first and the last version that generated it; the first one counts. Which
    tokens are of which version is not recorded, nor is why an episode was dropped.
    """
    yield _head("prime-rl", inferred="publish")
    version = -1
    numbers: dict[str, int] = {}
    for step, path in _numbered(directory, "rollouts/step_*/train/effective/traces.jsonl"):
        yield from _publish(version, step - 1)
        version = max(version, step - 1)
        for place in (path.parent.parent / "all" / path.name, path):
            for line, episode in _records(place) if place.is_file() else ():
                policy = _get(_get(episode, "run", place, line), "work", place, line).get("policy")
                if policy is None:
                    continue  # of a frozen policy
                name = _get(episode, "id", place, line)
                if name not in numbers:
                    numbers[name] = len(numbers)
                    act = {
                        "version": policy["start"],
                        "length": _get(episode, "num_output_tokens", place, line),
                    }
                    yield {"event": "act", "worker": 0, "sample": numbers[name], **act}
                if place is path:
                    place_of = {"worker": 0, "sample": numbers[name]}
                    yield {"event": "train", **place_of, "update": step}


def verl(directory: Path) -> Iterator[Event]:
    """The rollouts of verl: `trainer.rollout_data_dir`, a file for each global step.

    verl knows the versions of a trajectory, and has the oldest age of a step among its metrics
    (`training/off_policy/trajectory_staleness_worst/max`), but does not write them into these files
    (verl 7568). Where somebody has added `min_global_steps` to them, it counts.
    """
    yield _head("verl", inferred="publish act")
    version, sample = -1, 0
    for step, path in _numbered(directory, "*.jsonl"):
        yield from _publish(version, step - 1)
        version = max(version, step - 1)
        for line, record in _records(path):
            if "min_global_steps" not in record:
                raise TraceError(
                    f"{path}, line {line}: no 'min_global_steps': verl's rollouts name no version, "
                    "and nothing about their age can be checked. PPOTrainer._log_rollout_data has "
                    "min_global_steps in its tags, and could write it"
                )
            place = {"worker": 0, "sample": sample}
            sample += 1
            yield {"event": "act", **place, "version": record["min_global_steps"], "length": 1}
            yield {"event": "train", **place, "update": step}


IMPORTERS: dict[str, Callable[[Path], Iterator[Event]]] = {
    "prime-rl": prime_rl,
    "tinker-cookbook": tinker_cookbook,
    "verl": verl,
}


def write(source: str, directory: Path, trace: Path) -> None:
    """Write the trace of a directory of one of `IMPORTERS`."""
    if not directory.is_dir():
        raise TraceError(f"{directory} is not a directory")
    with open(trace, "w") as stream:
        for event in IMPORTERS[source](directory):
            stream.write(json.dumps(event) + "\n")


def _head(program: str, inferred: str) -> Event:
    head = {"program": program, "unit": "tokens", "inferred": inferred}
    return {"event": "trace", "format": FORMAT, **head}


def _publish(newest: int, version: int) -> Iterator[Event]:
    """The versions up to this one. A version counts the updates that it holds."""
    for number in range(newest + 1, version + 1):
        yield {"event": "publish", "version": number, "update": number}


def _numbered(directory: Path, pattern: str) -> list[tuple[int, Path]]:
    """Files by the number of their step, in its order."""
    files = []
    for path in directory.glob(pattern):
        numbers = re.findall(r"\d+", str(path.relative_to(directory)))
        if numbers:
            files.append((int(numbers[0]), path))
    if not files:
        raise TraceError(f"{directory} has no {pattern}")
    return sorted(files)


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                record = json.loads(line)
            except ValueError:
                if not line.endswith(b"\n"):
                    return  # the program is writing it, or was cut off
                raise TraceError(f"{path}, line {number}: not JSON") from None
            if not isinstance(record, dict):
                raise TraceError(f"{path}, line {number}: expected an object")
            yield number, record


def _get(record: Record, name: str, path: Path, line: int) -> Any:
    if name not in record:
        raise TraceError(f"{path}, line {line}: no {name!r}")
    return record[name]
