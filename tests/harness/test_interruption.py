"""Signals to a whole run: its status, its exit status, its checkpoint, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import run
from harness.checkpoints import Checkpoints
from harness.files import read_json

ROOT = Path(__file__).resolve().parents[2]
LONG = (
    "total_frames=100_000_000",
    "collector.frames_per_batch=64",
    "env.num_envs=4",
    "algo.minibatch_size=64",
    "algo.epochs=1",
    "model.hidden_sizes=[16]",
    "logger=jsonl",
)
BOUND_S = 60


@contextmanager
def running(directory: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a process of its own, once it has logged a record."""
    errors = directory.with_name("errors")
    process = subprocess.Popen(
        [sys.executable, "run.py", *LONG, *overrides, f"hydra.run.dir={directory}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=errors.open("w"),
        start_new_session=True,  # so that a signal to its group is a terminal's Ctrl-C
    )
    try:
        metrics = directory / "metrics.jsonl"
        wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text()))
        assert process.poll() is None, errors.read_text()
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("collector", ["single", "multi_sync", "multi_async"])
def test_ctrl_c_ends_a_run_with_a_checkpoint_from_which_it_goes_on(tmp_path, collector):
    directory = tmp_path / "run"
    with running(directory, f"collector={collector}") as process:
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(BOUND_S) == 130
        wait_until(lambda: not any(child.is_running() for child in children))
    assert read_json(directory / "status.json")["state"] == "interrupted"
    assert read_json(directory / "summary.json")["frames"] > 0
    (file,) = Checkpoints(directory / "checkpoints").files()
    frames = int(file.name.split("-")[0])
    assert run.main([f"resume={directory}", f"total_frames={frames + 512}"]) == 0
    assert read_json(directory / "status.json")["state"] == "done"


def test_sigterm_has_an_exit_status_of_its_own(tmp_path):
    directory = tmp_path / "run"
    with running(directory, "collector=multi_async") as process:
        process.terminate()
        assert process.wait(BOUND_S) == 143
    assert read_json(directory / "status.json")["state"] == "interrupted"
    assert Checkpoints(directory / "checkpoints").files()


def test_a_killed_worker_fails_the_run_with_its_name(tmp_path):
    directory = tmp_path / "run"
    with running(directory, "collector=multi_async") as process:
        descendants = psutil.Process(process.pid).children(recursive=True)
        worker = next(child for child in descendants if child.ppid() != process.pid)
        worker.kill()
        assert process.wait(BOUND_S) == 1
    assert "WorkerDied" in directory.with_name("errors").read_text()
    status = read_json(directory / "status.json")
    assert status["state"] == "failed"
    assert "worker" in status["error"]
