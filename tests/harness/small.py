"""Runs that last a moment, for tests of what is around runs."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import run
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


class Command:
    """The command, forked from this process, which has imported everything that it needs."""

    def __init__(self, *arguments: str, folder: Path):
        folder.mkdir(exist_ok=True)
        self.status: int | None = None  # exit status, or minus the signal that killed it
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.chdir(folder)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nowhere, stream)
            status = run.main(list(arguments))
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        status = self._wait(0)
        assert status is not None
        return status

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def _wait(self, options: int) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, options)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status


def wait_until(condition: Callable[[], object], process: Command | Popen[bytes]) -> None:
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
