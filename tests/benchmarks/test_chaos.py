"""Chaos itself: a few faults that are right, and what it must not overlook."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from functools import reduce

import pytest

from benchmarks.chaos import verdict
from benchmarks.chaos.faults import Fault, draw
from benchmarks.chaos.points import TRAINER, WORKER
from benchmarks.chaos.runs import Run
from benchmarks.chaos.victim import ROOT, Victim
from tests.lockstep_check import traces
from tests.lockstep_check.traces import remove, sound

SEED, FAULTS = 7, 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_few_faults_leave_nothing_wrong():
    options = ["--faults", str(FAULTS), "--seed", str(SEED)]
    command = [sys.executable, "-m", "benchmarks.chaos", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {SEED}" in done.stdout
    assert f"{FAULTS} faults struck" in done.stdout


def test_a_fault_is_always_the_same_and_every_point_at_which_one_strikes_is_there():
    for mounts in (True, False):
        once, again = (
            [str(draw(SEED, number, mounts=mounts)) for number in range(50)] for _ in range(2)
        )
        assert once == again
        assert len(set(once)) > 40
    for name, most in itertools.chain(*TRAINER.values(), *WORKER.values()):
        module, _, path = name.partition(":")
        found = importlib.import_module(module)
        assert callable(reduce(getattr, path.split("."), found)) if path else found
        assert most >= 1


# -- what the verdict sees


@pytest.fixture
def victim(tmp_path, monkeypatch):
    monkeypatch.setattr(verdict, "LEAVE_S", 0.2)
    victim = Victim(tmp_path / "victim")
    victim.directory.mkdir()
    victim.errors.write_text("")
    return victim


def write(victim: Victim, state: str, said: str = "", **counts: int) -> None:
    found = {"state": state, "error": "RuntimeError: it broke" if state == "failed" else None}
    (victim.directory / "status.json").write_text(json.dumps(found))
    (victim.directory / "summary.json").write_text("{}")
    victim.errors.write_text(said)
    if counts:
        record = {f"collector/{name}": n for name, n in counts.items()}
        (victim.directory / "metrics.jsonl").write_text(json.dumps({"step": 1, **record}) + "\n")


def judge(victim: Victim, code: int | None) -> list[str]:
    fault = Fault("nothing", {"done", "failed"}, Run())
    return verdict.judge(victim, fault, code, verdict.shm_entries())


WRONG_ENDS = [
    ("running", 0, "", "status.json says 'running'"),
    ("done", None, "", "it ended as 'hung'"),
    ("interrupted", 130, "lockstep: interrupted by SIGINT\n", "it ended as 'interrupted'"),
    ("failed", 1, "", "it failed without a word"),
    ("done", 0, "Traceback (most recent call last):\n", "it prints 'Traceback'"),
]


def test_a_wrong_end_and_frames_that_do_not_add_up_are_found_and_nothing_else(victim):
    write(victim, "done", collected=10, delivered=7, dropped=1, in_flight=2)
    assert judge(victim, 0) == []
    write(victim, "done", collected=10, delivered=7, dropped=0, in_flight=2)
    assert "frames do not add up" in "\n".join(judge(victim, 0))
    for state, code, said, finding in WRONG_ENDS:
        write(victim, state, said)
        assert finding in "\n".join(judge(victim, code))


def test_what_is_left_behind_is_found(victim):
    write(victim, "done")
    (victim.temporary / "half").write_text("")
    environment = {**os.environ, "LOCKSTEP_CHAOS_VICTIM": str(victim.folder)}
    with subprocess.Popen(["sleep", "60"], env=environment) as left:
        findings = "\n".join(judge(victim, 0))
        left.kill()
    assert f"left running: {left.pid} sleep 60" in findings
    assert "left: temporary file half" in findings


def test_a_damaged_checkpoint_is_found(victim):
    write(victim, "done")
    folder = victim.directory / "checkpoints"
    folder.mkdir()
    (folder / f"{5:012d}-{'0' * 16}.safetensors").write_bytes(b"half")
    assert "its hash differs from that in its name" in "\n".join(judge(victim, 0))


def test_a_trace_that_breaks_a_rule_is_found(victim):
    write(victim, "done")
    events = sound()
    traces.write(victim.directory / "events.jsonl", events)
    assert judge(victim, 0) == []
    remove("publish", version=6)(events)
    traces.write(victim.directory / "events.jsonl", events)
    assert "events.jsonl, line" in "\n".join(judge(victim, 0))
    assert "version 6, which is not published yet" in "\n".join(judge(victim, 0))
    (victim.directory / "events.jsonl").write_text("hello\n")
    assert "no trace: " in "\n".join(judge(victim, 0))
