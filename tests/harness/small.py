"""Runs that last a moment, for tests of what is around runs."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.files import read_json

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = (
    "total_frames=256",
    "collector=single",
    "collector.frames_per_batch=128",
    "env.num_envs=4",
    "algo.minibatch_size=64",
    "algo.epochs=2",
    "model.hidden_sizes=[16]",
    "evaluation.num_episodes=1",
    "logger=jsonl",
)


def jobs(sweep: str) -> list[Path]:
    """The directories of a sweep's jobs."""
    return sorted(file.parent for file in Path("outputs", sweep).glob("*/config.yaml"))


def states(sweep: str) -> dict[str, str]:
    """The state of each job, by its directory's name."""
    files = Path("outputs", sweep).glob("*/status.json")
    return {file.parent.name: read_json(file)["state"] for file in files}


def start(*arguments: str, folder: Path, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """The command, in a process of its own."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=stdout, text=True)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for it, as long as the process lives."""
    while not condition():
        assert process.poll() is None, "the sweep ended early"
        time.sleep(0.02)


@contextmanager
def little_room(most_bytes: int) -> Iterator[None]:
    """A limit on the size of files stands in for a full disk: writing fails half-way, as there."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
