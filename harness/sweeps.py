"""When a sweep starts no further jobs, because too many have failed."""

from __future__ import annotations

from pathlib import Path

from harness.files import read_json

STARTED = "multirun.yaml"  # written by the sweeper when the sweep is started


def failures(folder: Path) -> int:
    """How many jobs in a sweep's directory have failed since the sweep was last started."""
    started = folder / STARTED
    since = started.stat().st_mtime_ns if started.exists() else 0
    return sum(
        read_json(file).get("state") == "failed" and file.stat().st_mtime_ns >= since
        for file in folder.glob("*/status.json")
    )


def is_stopped(folder: Path, limit: int | None) -> bool:
    """Whether so many jobs have failed that no other may start; `limit` None: never."""
    return limit is not None and failures(folder) >= limit
