"""A Ray cluster of this machine's own for tests, and the end of all of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from sync.remote.ray_engine import use_token_authentication

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "error",
}


@contextmanager
def cluster(**options: Any) -> Iterator[str]:
    """A local cluster, of which no process is left afterwards; or what `address=...` leads to."""
    use_token_authentication()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["PYTHONPATH"] = str(ROOT)  # which its workers inherit
    import ray

    before = set(psutil.Process().children(recursive=True))
    is_ours = "address" not in options
    if is_ours:
        # "local": never one that another test has started meanwhile.
        ours = {"address": "local", "num_cpus": 4, "object_store_memory": 200_000_000}
        options = {**ours, **options}
    context = ray.init(**{**OPTIONS, **options})
    started = set(psutil.Process().children(recursive=True)) - before if is_ours else set()
    try:
        yield context.address_info["address"]
    finally:
        ray.shutdown()
        deadline = time.monotonic() + 20.0
        while left := [p for p in started if p.is_running() and p.status() != "zombie"]:
            assert time.monotonic() < deadline, f"Ray left {left}"
            time.sleep(0.05)
