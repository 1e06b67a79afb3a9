"""Files that are whole or not there: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_atomic(file: Path, content: bytes | str) -> None:
    """Replace `file` by `content`; a reader, or a crash, sees the old or the new, never a part."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    data = content.encode() if isinstance(content, str) else content
    with open(beside, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make what was renamed within a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(file: Path, value: Any) -> None:
    """`value` as JSON that a person can read, atomically."""
    write_atomic(file, json.dumps(plain(value), indent=2) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; empty if there is no such file."""
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds {type(value).__name__}, expected an object")
    return value


def plain(value: Any) -> Any:
    """`value` with what JSON does not know (NaN, infinities, paths, numpy numbers) made to fit."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
