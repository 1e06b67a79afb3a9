"""Launchers and sweepers that a sweep may name: refused here if they cannot work."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

from harness.config.compose import parse, plugin_choices
from harness.config.errors import ConfigError
from harness.config.schema import Config

NEEDS = {
    "hydra/launcher=submitit_local": ("submitit", "sweep"),
    "hydra/launcher=submitit_slurm": ("submitit", "sweep"),
    "hydra/sweeper=optuna": ("optuna", "optuna"),
}


def check_plugins(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a launcher or sweeper whose package is missing."""
    for group, choice in plugin_choices(overrides).items():
        chosen = f"{group}={choice}"
        module, extra = NEEDS.get(chosen, (None, None))
        if module is not None and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{chosen} needs {module}; install it with: pip install -e '.[{extra}]'"
            )


def check_launcher(overrides: Sequence[str], jobs: Iterable[Config]) -> None:
    """Raise `ConfigError` for a launcher in whose processes these jobs cannot run."""
    if ("hydra/launcher", "joblib") not in [(o.key_or_group, o.value()) for o in parse(overrides)]:
        return
    for job in jobs:
        workers = f"collector={job.collector.name}" if job.collector.name != "single" else ""
        vector = "env.vectorisation=async" if job.env.vectorisation == "async" else ""
        if workers or vector:
            raise ConfigError(
                f"hydra/launcher=joblib {workers or vector}: joblib's processes start others in a "
                "way of its own, in which no worker comes up; take hydra/launcher=submitit_local"
            )
