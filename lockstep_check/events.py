"""The trace: one JSON object a line, in the order in which the trainer learned of the events.

    {"event": "trace", "format": 1, "program": "lockstep 0.3.0", "unit": "frames"}
    {"event": "publish", "version": 0, "update": 0}
    {"event": "act", "worker": 0, "sample": 0, "length": 16, "version": 0}
    {"event": "enqueue", "worker": 0, "sample": 0}
    {"event": "take", "worker": 0, "sample": 0}
    {"event": "train", "worker": 0, "sample": 0, "update": 1}
    {"event": "publish", "version": 1, "update": 1}

`FIELDS` has every field. Only those marked as required must be there; a rule that needs another one
is not checked where it is missing, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "events.jsonl"  # in a run directory
FORMAT = 1


@dataclass(frozen=True)
class Field:
    """One field of an event."""

    kind: type | tuple[type, ...]
    meaning: str
    required: bool = False


def _int(meaning: str, required: bool = False) -> Field:
    return Field(int, meaning, required)


_SAMPLE = {
    "worker": _int("who made the sample", required=True),
    "sample": _int("its number, which rises for each worker", required=True),
}
_LENGTH = _int("frames or tokens; all of the sample if it is missing")
_STAMP = _int("the version that the program has noted for the sample")

FIELDS: dict[str, dict[str, Field]] = {
    "trace": {
        "format": _int("version of this format", required=True),
        "program": Field(str, "what wrote the trace"),
        "unit": Field(str, "what lengths count: frames or tokens"),
        "inferred": Field(str, "kinds of events that were not recorded, and follow from others"),
    },
    "publish": {
        "version": _int("a version that is complete, and may be used from now on", required=True),
        "update": _int("updates of the trainer that it holds"),
        "step": _int("gradient steps that it holds"),
        "checksum": Field(str, "of the weights"),
    },
    "applied": {
        "worker": _int("who uses the version from now on", required=True),
        "version": _int("the version", required=True),
        "checksum": Field(str, "of the weights that the worker has"),
    },
    "act": {
        **_SAMPLE,
        "version": _int("the version that computed these frames or tokens", required=True),
        "length": _int("how many of them", required=True),
        "call": _int("number of the policy call, for each worker"),
        "cache": _int("the oldest version whose cached state (keys and values) was used"),
        "logprob": Field((int, float), "sum of the log-probabilities of the actions"),
    },
    "enqueue": {
        **_SAMPLE,
        "length": _LENGTH,
        "version": _STAMP,
        "newest": _int("the newest version when the sample was finished"),
    },
    "take": {**_SAMPLE, "length": _LENGTH, "version": _STAMP},
    "train": {
        **_SAMPLE,
        "update": _int("number of the update that uses the sample, from 1", required=True),
        "epoch": _int("pass over the data of the update, from 0"),
        "step": _int("gradient steps done before"),
        "length": _LENGTH,
        "version": _STAMP,
        "age": _int("the age that the program itself reports, in its own unit"),
        "logprob": Field((int, float), "sum of the log-probabilities in the ratio's denominator"),
    },
    "drop": {
        **_SAMPLE,
        "reason": Field(str, "why", required=True),
        "length": _LENGTH,
        "version": _int("that made what is given up, where a part is chosen by its version"),
    },
    "counts": {
        "collected": _int("frames or tokens made so far", required=True),
        "delivered": _int("of these, taken by the trainer", required=True),
        "dropped": _int("of these, given up before", required=True),
        "in_flight": _int("of these, neither", required=True),
    },
    "resume": {
        "update": _int("updates of the state that the run goes on from", required=True),
        "dropped": _int("frames or tokens in flight that are given up"),
    },
}
_REQUIRED = {
    event: tuple((name, field.kind) for name, field in fields.items() if field.required)
    for event, fields in FIELDS.items()
}
_OPTIONAL = {
    event: {name: field.kind for name, field in fields.items() if not field.required}
    for event, fields in FIELDS.items()
}

Event = dict[str, Any]


class TraceError(ValueError):
    """What was named is no trace, or a line of it is none."""


@dataclass
class Reading:
    """What was met beside the events."""

    lines: int = 0
    cut: bool = False  # whether the last line has no end
    unknown: dict[str, int] = field(default_factory=dict)  # events of other names, by name


def find(place: str | Path) -> Path:
    """The trace that a path names: a file, or a run directory that has one."""
    path = Path(place)
    if path.is_dir():
        if (path / FILE).is_file():
            return path / FILE
        raise TraceError(
            f"{path} has no {FILE}: Lockstep writes it with callbacks=[events]; "
            "docs/check.md says how other programs do"
        )
    if not path.is_file():
        raise TraceError(f"{path} is not there")
    return path


def read(path: Path, reading: Reading | None = None) -> Iterator[tuple[int, Event]]:
    """The events with the numbers of their lines. A last line that is cut ends the trace."""
    reading = reading or Reading()
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            reading.lines = number
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except ValueError:
                if not line.endswith(b"\n"):
                    reading.cut = True
                    return
                raise TraceError(f"{path}, line {number}: not JSON: {_start(line)}") from None
            if not isinstance(event, dict) or type(event.get("event")) is not str:
                raise TraceError(
                    f'{path}, line {number}: expected an object with an "event", got {_start(line)}'
                )
            kind = event["event"]
            if kind not in FIELDS:
                reading.unknown[kind] = reading.unknown.get(kind, 0) + 1
                continue
            if problem := _problem(kind, event):
                raise TraceError(f"{path}, line {number}: {problem}")
            yield number, event


def _problem(kind: str, event: Event) -> str:
    """What is wrong with an event of this kind; empty if nothing is."""
    for name, expected in _REQUIRED[kind]:
        if name not in event:
            return f"{kind} has no {name!r}"
        if type(event[name]) is not expected:
            return f"{kind} has {name}={event[name]!r}, expected {_name(expected)}"
    optional = _OPTIONAL[kind]
    for name, value in event.items():
        kinds = optional.get(name)
        if kinds is None or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds):
            return f"{kind} has {name}={value!r}, expected {_name(kinds)}"
    if kind == "trace" and event["format"] != FORMAT:
        return f"the trace has format {event['format']}, and this version reads {FORMAT}"
    return ""


def _name(kinds: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text"}
    return "a number" if isinstance(kinds, tuple) else names[kinds]


def _start(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace").rstrip("\n"))


def schema() -> dict[str, Any]:
    """The format as a JSON Schema of one line."""
    types = {int: "integer", float: "number", str: "string"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "One event of a trace",
        "oneOf": [
            {
                "type": "object",
                "properties": {
                    "event": {"const": event},
                    "time": {"type": "number", "description": "seconds, of any clock"},
                    **{
                        name: {
                            "type": "number"
                            if isinstance(entry.kind, tuple)
                            else types[entry.kind],
                            "description": entry.meaning,
                        }
                        for name, entry in fields.items()
                    },
                },
                "required": ["event", *(name for name, entry in fields.items() if entry.required)],
            }
            for event, fields in FIELDS.items()
        ],
    }
