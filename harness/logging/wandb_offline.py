"""Reads the file of an offline W&B run: settings, history, and how the run ended.

The file is a log in LevelDB's format of W&B's own records. It starts with seven bytes of header and
is cut into blocks of 32 KiB, whose records have a header of checksum, length and type; a record
that crosses a block's end comes in parts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

MAGIC = b":W&B"
BLOCK = 1 << 15
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(data: bytes) -> list[Any]:
    """The records of a file; those after damage are left out."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    if not data.startswith(MAGIC):
        raise ValueError("it is no file of an offline W&B run")
    rows = []
    for part in scan(data):
        try:
            rows.append(Record.FromString(part))
        except DecodeError:
            break
    return rows


def scan(data: bytes) -> Iterator[bytes]:
    """The bytes of each record."""
    at, parts = 7, b""
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK  # a header does not cross a block's end
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        part, at = data[at : at + length], at + length
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts


def settings(rows: list[Any]) -> dict[str, Any]:
    """The run's config, without what W&B adds."""
    values = {}
    for row in rows:
        updates = [*row.run.config.update, *row.config.update]
        for update in updates:
            name = "/".join(update.nested_key) or update.key
            values[name] = json.loads(update.value_json)
    return {name: value for name, value in values.items() if name != "_wandb"}


def history(rows: list[Any]) -> list[dict[str, Any]]:
    """What was logged, a step each."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for row in rows
        if (items := row.history.item)
    ]


def name(rows: list[Any]) -> str | None:
    """The run's display name."""
    return next((row.run.display_name for row in rows if row.run.display_name), None)


def exit_code(rows: list[Any]) -> int | None:
    """How the run ended; None if it did not."""
    return next((row.exit.exit_code for row in rows if row.HasField("exit")), None)
