"""The jobs of the committed experiments."""

from __future__ import annotations

import json
from pathlib import Path

from collectors.schedule.recording import FORMAT
from harness.config.compose import compose_run
from harness.run_directory import SCHEDULE
from harness.sweep.sweep import jobs_of


def jobs_of_experiment(name: str, *overrides: str) -> list[list[str]]:
    """The overrides of each job of `--multirun experiment=<name>`."""
    composed = compose_run([f"experiment={name}"])
    return jobs_of(composed.hydra.sweeper.params, [f"experiment={name}", *overrides])


def write_recording(run: Path, seed: int) -> None:
    """As much of a run of `experiment=recorded` as its replay reads: a schedule of one batch."""
    header = {"format": FORMAT, "num_workers": 4, "num_steps": 128, "num_envs": 16, "seed": seed}
    batch = {"worker": 0, "generation": 0, "versions": [[0, 0]], "at_s": 1.0}
    run.mkdir(parents=True)
    lines = [json.dumps(line) + "\n" for line in (header, batch)]
    (run / SCHEDULE).write_text("".join(lines))
