"""What a run listens on: nothing, or loopback alone; strangers there neither stop nor enter it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import run
from harness.files import read_json
from tests.security.sockets import Listener, listeners, strangers

ROOT = Path(run.__file__).parent
ENDLESS = (
    "total_frames=1000000000",
    "collector.frames_per_batch=128",
    "env.num_envs=4",
    "algo.minibatch_size=64",
    "model.hidden_sizes=[4]",
    "evaluation.at_end=false",
    "checkpoint.at_end=false",
    "collector.timeout_s=20",
)
WAIT_S = 100.0


class Running:
    """A run in a process of its own, and what it has listened on since it started."""

    def __init__(self, folder: Path, *overrides: str):
        self.directory = folder / "run"
        self.seen: set[Listener] = set()
        command = [sys.executable, str(ROOT / "run.py"), f"hydra.run.dir={self.directory}"]
        self.process = subprocess.Popen(
            [*command, *ENDLESS, *overrides],
            cwd=folder,
            env={**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def records(self) -> int:
        file = self.directory / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def wait_for_records(self, number: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.records() < number:
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < deadline
            self.seen |= listeners(self.process.pid)
            time.sleep(0.05)

    def end(self) -> str:
        self.process.terminate()
        _, said = self.process.communicate(timeout=WAIT_S)
        return said


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*overrides: str) -> Running:
        started.append(Running(tmp_path, *overrides))
        started[-1].wait_for_records(3)
        return started[-1]

    yield start
    for running in started:
        running.end()


@pytest.mark.timeout(300)
def test_a_run_on_one_machine_listens_on_nothing_and_neither_does_wandb_offline(start):
    running = start("collector=multi_async", "collector.num_workers=1", "logger=wandb")
    assert running.seen == set()
    assert (running.directory / "wandb").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", [pytest.param("rpc", marks=pytest.mark.slow), "distributed"])
def test_strangers_neither_stop_nor_enter_a_run_that_listens_on_loopback(start, engine):
    running = start(f"collector={engine}", f"sync={engine}", "logger=jsonl")
    assert running.seen
    assert all(listener.is_loopback for listener in running.seen)
    open_now = listeners(running.process.pid)
    came = [stranger for listener in open_now for stranger in strangers(listener)]
    try:
        running.wait_for_records(running.records() + 20)
    finally:
        for stranger in came:
            stranger.close()
    running.wait_for_records(running.records() + 5)
    said = running.end()
    assert "Traceback" not in said
    assert "RPC agent" not in said  # torch's warnings of connections that end
    assert read_json(running.directory / "status.json")["state"] == "interrupted"
