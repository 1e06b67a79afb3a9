"""`--multirun`: every job's config is checked before the first job starts; hydra launches them."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from harness.config.compose import (
    CONF,
    HYDRA_VERSION,
    expand_sweep,
    fixed_keys,
    forced_in_sweep,
    sweep_dir,
)
from harness.config.errors import ConfigError
from harness.config.load import RunPlan, plan_from_options, plan_run
from harness.files import read_json
from harness.run_dir import RunDir

FAILED = 1


def run_sweep(overrides: Sequence[str]) -> int:
    """Run all jobs and report those that did not get done; the exit status."""
    for job in expand_sweep(overrides) or []:
        try:
            plan_run(job)
        except ConfigError as error:
            raise ConfigError(f"{error} (in the job {' '.join(job)})") from None
    folder = sweep_dir(overrides)
    before = sys.argv
    # A job is named by what the sweep varies.
    unnamed = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed_keys(overrides))}]"
    arguments = [*forced_in_sweep(overrides), f"hydra.sweep.dir={folder}", unnamed]
    sys.argv = ["run.py", "--multirun", *arguments]
    try:
        hydra.main(version_base=HYDRA_VERSION, config_path=str(CONF), config_name="config")(_job)()
    except SystemExit as ended:  # a signal ended a job, and with it the sweep
        report(folder)
        return ended.code if isinstance(ended.code, int) else FAILED
    finally:
        sys.argv = before
    return report(folder)


def _job(composed: DictConfig) -> float:
    """One job, in whatever process the launcher gives it; what a sweeper may optimise."""
    from harness.execute import execute

    options = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(options, dict)
    hydra_config = HydraConfig.get()
    directory = Path(hydra_config.runtime.output_dir)
    try:
        outcome = execute(_plan(options, directory, list(hydra_config.overrides.task)))
    except ConfigError as error:  # found too late to refuse the sweep; the other jobs go on
        run_dir = RunDir.open(directory, config=OmegaConf.to_yaml(composed), manifest={})
        run_dir.end("failed", summary={}, error=error)
        return math.nan
    if outcome.exit_status > 128:
        raise SystemExit(outcome.exit_status)
    return outcome.objective


def _plan(options: dict[Any, Any], directory: Path, overrides: list[str]) -> RunPlan:
    plan = plan_from_options({str(k): v for k, v in options.items()}, directory, overrides)
    plan.sweep = directory.parent.name
    return plan


def report(folder: Path) -> int:
    """Say how the jobs of a sweep ended; the exit status."""
    found = {file.parent: read_json(file) for file in sorted(folder.glob("*/status.json"))}
    states = Counter(status.get("state") for status in found.values())
    print(f"{folder}: " + ", ".join(f"{count} {state}" for state, count in states.items()))
    for directory, status in found.items():
        if status.get("state") != "done":
            print(f"  {status.get('state')}: {directory}: {status.get('error')}", file=sys.stderr)
    return 0 if set(states) <= {"done"} else FAILED


def show_config(overrides: Sequence[str]) -> int:
    """Print what would be run, and run nothing."""
    print(plan_run(overrides).yaml, end="")
    return 0
