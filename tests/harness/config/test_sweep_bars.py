"""The bars of a sweep's running jobs, drawn from the directories of real runs."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console

import run
from harness.run_directory import RunDir
from harness.sweep.progress import Progress
from tests.harness.small import SMALL

BEGAN_S = 1_000_000_000.0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    options = ("total_frames=1024", "evaluation.at_end=false", f"hydra.run.dir={folder}")
    assert run.main([*SMALL, *options]) == 0
    return folder


def half_done(finished: Path, job: Path) -> RunDir:
    """What the run had written after half of its frames, with ten seconds between batches."""
    shutil.copytree(finished, job)
    run_dir = RunDir(job)
    records = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()][:4]
    assert [record["step"] for record in records] == [128, 256, 384, 512]
    for i, record in enumerate(records):
        record |= {"time": BEGAN_S + 10 * i, "episode/return": 20.0 + i}
    lines = "".join(json.dumps(record) + "\n" for record in records)
    run_dir.metrics.write_text(f'{lines}{{"step": 640, "ti')  # a record is being written
    run_dir.set_state("running")
    os.utime(run_dir.status, (BEGAN_S - 1, BEGAN_S - 1))
    return run_dir


class Sweep:
    """Jobs that are watched on a terminal, or where there is none."""

    def __init__(self, *jobs: Path, terminal: bool = True, width: int = 100):
        self.text = io.StringIO()
        self.console = Console(
            file=self.text, force_terminal=terminal, width=width, color_system=None
        )
        self.progress = Progress(jobs[0].parent, jobs)

    def shown(self) -> list[str]:
        """What stands on the screen, after `start`: the last drawing."""
        while "frames" not in self.text.getvalue():
            time.sleep(0.01)
        drawn = re.sub(r"\x1b\[\?25.", "", self.text.getvalue())  # the cursor is hidden
        return [line.rstrip() for line in drawn.split("\x1b[2K")[-1].splitlines()]


def test_a_running_job_has_a_bar_with_its_frames_return_and_time_left(finished, tmp_path):
    job = tmp_path / "seed=1"
    sweep = Sweep(job)
    run_dir = half_done(finished, job)
    sweep.progress.start(console=sweep.console)
    (line,) = sweep.shown()
    bar = f"{'━' * 10}{' ' * 10}"
    assert line == f"seed=1  {bar}  512/1,024 frames  return 23  40 s left"
    print("python run.py" + " option=value" * 20)
    run_dir.set_state("done")
    sweep.progress.stop()
    assert f"python run.py{' option=value' * 20}\n" in sweep.text.getvalue()
    assert f"[1/1] {job}: done\n" in sweep.text.getvalue()
    assert sweep.text.getvalue().endswith("\x1b[1A\x1b[2K")  # no bar is left


def test_the_pace_of_a_job_that_goes_on_is_that_since_its_new_start(finished, tmp_path):
    sweep = Sweep(tmp_path / "seed=1")
    run_dir = half_done(finished, tmp_path / "seed=1")
    os.utime(run_dir.status, (BEGAN_S + 15, BEGAN_S + 15))
    text = run_dir.metrics.read_text()
    for time_s in (BEGAN_S, BEGAN_S + 10):  # a day before
        text = text.replace(f'"time": {time_s}', f'"time": {time_s - 86_400}')
    run_dir.metrics.write_text(text)
    sweep.progress.start(console=sweep.console)
    (line,) = sweep.shown()
    sweep.progress.stop()
    assert line.endswith("512/1,024 frames  return 23  40 s left")


def test_bars_fit_a_narrow_terminal_and_only_running_jobs_have_one(finished, tmp_path):
    jobs = [tmp_path / f"{'a.long.option=value,' * 3}seed={seed}" for seed in range(4)]
    sweep = Sweep(*jobs, width=72)
    for job in jobs[:3]:
        half_done(finished, job)
    (jobs[1] / "config.yaml").write_text("total_")  # is being written
    RunDir(jobs[2]).set_state("failed")
    sweep.progress.start(console=sweep.console)
    (line,) = sweep.shown()
    sweep.progress.stop()
    assert line.startswith("a.long")
    assert "… " in line
    assert "512/1,024 frames  return 23  40 s left" in line
    assert len(line) <= 72


def test_without_a_terminal_there_are_lines_alone(finished, tmp_path, capsys):
    job = tmp_path / "seed=1"
    sweep = Sweep(job, terminal=False)
    run_dir = half_done(finished, job)
    sweep.progress.start(console=sweep.console)
    run_dir.set_state("done")
    sweep.progress.stop()
    assert sweep.text.getvalue() == ""
    assert capsys.readouterr().out == f"[1/1] {job}: done\n"
