"""Reads the file of an offline W&B run: a log in LevelDB's format of W&B's own records.

It starts with seven bytes of header and is cut into blocks of 32 KiB, whose records have a header
of checksum, length and type; a record that crosses a block's end comes in parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 1 << 15
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read(folder: Path) -> list[Record]:
    """The records of the one run that was written to a folder."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    return [Record.FromString(part) for part in scan(file.read_bytes())]


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
