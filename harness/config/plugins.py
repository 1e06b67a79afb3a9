"""Launchers and sweepers that a sweep may name: refused here if they cannot work."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

from harness.config.compose import parse, plugin_choices
from harness.config.errors import ConfigError
from harness.config.schema import Config

NEEDS = {
    "hydra/launcher=submitit_local": ("hydra_plugins.hydra_submitit_launcher", "sweep"),
    "hydra/launcher=submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "sweep"),
    "hydra/sweeper=optuna": ("optuna", "optuna"),
}


def check_plugins(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a launcher or sweeper whose package is missing."""
    for override in parse(overrides):  # first, as Hydra cannot compose without the package's config
        _check_plugin(f"{override.key_or_group}={override.value()}")
    for group, choice in plugin_choices(overrides).items():
        _check_plugin(f"{group}={choice}")


def _check_plugin(chosen: str) -> None:
    module, extra = NEEDS.get(chosen, (None, None))
    if module is not None and importlib.util.find_spec(module) is None:
        package = module.removeprefix("hydra_plugins.").replace("_", "-")
        raise ConfigError(f"{chosen} needs {package}; install it with: pip install -e '.[{extra}]'")


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
                "way of its own, in which no worker comes up; take hydra/launcher=local"
            )
