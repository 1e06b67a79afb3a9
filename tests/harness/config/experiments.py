"""The jobs of the committed experiments."""

from __future__ import annotations

from harness.config.compose import compose_run
from harness.config.sweep import jobs_of


def jobs_of_experiment(name: str, *overrides: str) -> list[list[str]]:
    """The overrides of each job of `--multirun experiment=<name>`."""
    composed, _ = compose_run([f"experiment={name}"])
    return jobs_of(composed.hydra.sweeper.params, [f"experiment={name}", *overrides])
