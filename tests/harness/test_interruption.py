"""Signals to a whole run: its status, its exit status, its checkpoint, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import psutil
import pytest

import run
from collectors import Collector
from harness.config.plan import plan_run
from harness.environments import evaluate
from harness.files import read_json
from harness.logging import JsonlLogger
from harness.run.checkpoints import Checkpoints
from harness.run.run_lifetime import execute
from harness.run.training_loop import TrainingLoop
from tests.harness.small import SMALL
from tests.interrupts import Interrupt

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


@pytest.mark.parametrize(
    "collector",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("single", "multi_sync")),
        "multi_async",
    ],
)
def test_ctrl_c_ends_a_run_with_a_checkpoint_from_which_it_goes_on(tmp_path, collector, capsys):
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
    # harness.reproduce refuses a recording that was resumed.
    assert ("repeat:" in capsys.readouterr().out) == (collector != "multi_async")


def test_an_evaluation_that_is_interrupted_is_made_up_for(tmp_path, monkeypatch):
    options = [*SMALL, "evaluation.every_frames=128"]
    assert run.main([*options, f"hydra.run.dir={tmp_path / 'whole'}"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "play", insist_on_the_end)
        assert run.main([*options, f"hydra.run.dir={tmp_path / 'ended'}"]) == 130
    (file,) = Checkpoints(tmp_path / "ended" / "checkpoints").files()
    assert int(file.name.split("-")[0]) == 128
    assert run.main([f"resume={tmp_path / 'ended'}"]) == 0
    whole, ended = (evaluations(tmp_path / name) for name in ("whole", "ended"))
    assert len(whole) == 2
    assert ended == whole


@pytest.mark.parametrize("log_every", [1, 1000])
def test_what_is_recorded_after_the_last_checkpoint_is_recorded_once(
    tmp_path, monkeypatch, log_every
):
    options = [*SMALL, "checkpoint.every_frames=128", f"log_every_frames={log_every}"]
    assert run.main([*options, f"hydra.run.dir={tmp_path / 'whole'}"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "summary", lambda _: os.kill(os.getpid(), signal.SIGINT))
        assert run.main([*options, f"hydra.run.dir={tmp_path / 'ended'}"]) == 130
    assert run.main([f"resume={tmp_path / 'ended'}"]) == 0
    whole, ended = (steps(tmp_path / name) for name in ("whole", "ended"))
    assert ended == whole
    assert run.main([f"resume={tmp_path / 'ended'}", "total_frames=384"]) == 0
    assert steps(tmp_path / "ended")[: len(whole)] == whole


@pytest.mark.parametrize("number", [5, 10])
def test_a_signal_that_comes_as_the_run_begins_to_listen_ends_it_in_order(tmp_path, number):
    plan = plan_run([*SMALL, f"hydra.run.dir={tmp_path / 'run'}"])
    with Interrupt(number, "harness/run/signals.py") as interrupt:
        assert execute(plan).exit_status == 130
    assert "_execute" in interrupt.where
    assert read_json(tmp_path / "run" / "status.json")["state"] == "interrupted"


def insist_on_the_end(*given, **named):
    for _ in range(2):  # the first signal waits for a good point
        os.kill(os.getpid(), signal.SIGINT)


def steps(directory: Path) -> list[tuple[int, bool]]:
    """The frame of each record, and whether there is an evaluation in it."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], "eval/return" in r) for r in records]


def evaluations(directory: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["eval/return"]) for r in records if "eval/return" in r]


def test_sigterm_has_an_exit_status_of_its_own(tmp_path):
    directory = tmp_path / "run"
    with running(directory, "collector=multi_async") as process:
        os.killpg(process.pid, signal.SIGTERM)  # to its workers too, as a scheduler does
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


def test_a_second_ctrl_c_while_the_checkpoint_is_written_ends_the_run_in_one_line(
    tmp_path, monkeypatch, capsys
):
    log = JsonlLogger.log

    def first(logger, *given):
        log(logger, *given)
        os.kill(os.getpid(), signal.SIGINT)

    def second(_):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(JsonlLogger, "log", first)
    monkeypatch.setattr(Collector, "state_dict", second)
    assert run.main([*SMALL, f"hydra.run.dir={tmp_path / 'run'}"]) == 130
    captured = capsys.readouterr()
    assert captured.err == "lockstep: interrupted by SIGINT before there was a checkpoint\n"
    assert "resume:" not in captured.out
    assert read_json(tmp_path / "run/status.json")["state"] == "interrupted"


def test_a_run_that_a_signal_comes_too_late_to_end_is_done(tmp_path, monkeypatch, capsys):
    shutdown = Collector.shutdown

    def late(collector, **options):
        os.kill(os.getpid(), signal.SIGINT)
        shutdown(collector, **options)

    monkeypatch.setattr(Collector, "shutdown", late)
    assert run.main([*SMALL, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert read_json(tmp_path / "run/status.json")["state"] == "done"
    assert "interrupted" not in capsys.readouterr().err


def test_ctrl_c_before_there_is_a_run_ends_in_one_line(monkeypatch, capsys):
    class Loading(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "harness.application", Loading("loading"))
    assert run.main(["seed=1"]) == 130
    assert capsys.readouterr().err == "lockstep: interrupted by SIGINT\n"
