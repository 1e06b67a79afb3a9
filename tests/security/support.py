"""A real run directory to spoil, and the command on it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import run
from harness.application import USAGE_ERROR
from harness.config.plan import plan_run
from harness.errors import ConfigError
from harness.run.run_lifetime import execute
from harness.run_directory import RunDir

TINY = (
    "collector=single",
    "sync=none",
    "total_frames=64",
    "collector.frames_per_batch=64",
    "env.num_envs=2",
    "algo.minibatch_size=64",
    "algo.epochs=1",
    "model.hidden_sizes=[4]",
    "evaluation.at_end=false",
    "logger=jsonl",
)


class Said(NamedTuple):
    """How the command ended."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Its complaint: one line, no traceback. Before it may come what was logged aloud."""
        lines = self.err.splitlines()
        assert lines
        assert all(line.startswith(("ERROR: ", "WARNING: ")) for line in lines[:-1])
        assert lines[-1].startswith("lockstep: ")
        assert lines[-1].isprintable()
        return lines[-1]


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    """What the command says to these arguments, in this process."""
    capsys.readouterr()
    status = run.main(list(arguments))
    captured = capsys.readouterr()
    return Said(status, captured.out, captured.err)


def resume(capsys: pytest.CaptureFixture[str], directory: Path, *overrides: str) -> Said:
    """What `run.py resume=...` does, less the application around it."""
    capsys.readouterr()
    try:
        plan = plan_run([f"resume={directory}", *overrides])
        status = execute(plan).exit_status
    except ConfigError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        status = USAGE_ERROR
    captured = capsys.readouterr()
    return Said(status, captured.out, captured.err)


def made_run(folder: Path) -> Path:
    """A run with its last checkpoint, which did not get to say that it is done."""
    assert run.main([*TINY, f"hydra.run.dir={folder}"]) == 0
    RunDir(folder).set_state("interrupted")
    return folder


def copy(run_dir: Path, to: Path) -> Path:
    return Path(shutil.copytree(run_dir, to, symlinks=True))
