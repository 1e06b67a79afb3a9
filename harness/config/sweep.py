"""`--multirun`: every job's config is checked before the first job starts; hydra launches them."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from harness.config.compose import (
    CONF,
    HYDRA_VERSION,
    compose_job,
    expand_sweep,
    fixed_keys,
    forced_in_sweep,
    sweep_dir,
    sweeper_options,
)
from harness.config.errors import ConfigError, ImpossiblePair
from harness.config.load import RunPlan, plan_from_options, plan_run
from harness.config.plugins import check_launcher, check_plugins
from harness.config.space import split
from harness.files import read_json
from harness.run_dir import RunDir
from harness.search import SearchConfig, Trial
from harness.sweeps import failures, is_stopped

FAILED = 1
OUTPUTS = "outputs"
SOUND = {"done", "pruned"}
LONGEST_ERROR = 300


def run_sweep(overrides: Sequence[str]) -> int:
    """Run all jobs and report those that did not get done; the exit status."""
    check_plugins(overrides)
    jobs = expand_sweep(overrides)
    plans = _plans(_corners(overrides) if jobs is None else jobs)
    num_jobs = None if jobs is None else len(plans)
    limit = plans[0].stop_after_failures if plans else None
    check_launcher(overrides, [plan.config for plan in plans])
    folder = sweep_dir(overrides)
    _make(folder)
    before = sys.argv
    # A job is named by what the sweep varies.
    unnamed = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed_keys(overrides))}]"
    arguments = [*forced_in_sweep(overrides), f"hydra.sweep.dir={folder}", unnamed]
    sys.argv = ["run.py", "--multirun", *arguments]
    try:
        hydra.main(version_base=HYDRA_VERSION, config_path=str(CONF), config_name="config")(_job)()
    except SystemExit as ended:  # a signal ended a job, and with it the sweep
        report(folder, num_jobs, limit)
        return ended.code if isinstance(ended.code, int) else FAILED
    except KeyboardInterrupt:
        report(folder, num_jobs, limit)
        raise
    finally:
        sys.argv = before
    return report(folder, num_jobs, limit)


def _make(folder: Path) -> None:
    """Where nothing can be written, hydra would say so in a traceback."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written: it is read-only")


def _plans(jobs: Sequence[Sequence[str]]) -> list[RunPlan]:
    """The plan of every job, but of those that are left out, which are named."""
    plans, left_out = [], {}
    for job in jobs:
        try:
            plans.append(_new(plan_run(job)))
        except ImpossiblePair as error:
            if not _skips_impossible(compose_job(job)[0]):
                raise ImpossiblePair(
                    f"{error} (in the job {' '.join(job)}; skip_impossible=true leaves it out)"
                ) from None
            left_out[str(error)] = error
        except ConfigError as error:
            raise ConfigError(f"{error} (in the job {' '.join(job)})") from None
    if left_out and not plans:
        raise next(iter(left_out.values()))
    for reason in left_out:
        print(f"left out: {reason}")
    return plans


def _new(plan: RunPlan) -> RunPlan:
    if plan.resume:
        raise ConfigError(
            f"resume={plan.directory} with --multirun: a sweep starts new runs; "
            "resume each of its runs in a command of its own"
        )
    return plan


def _skips_impossible(options: dict[str, Any]) -> bool:
    value = options.get("skip_impossible", False)
    if not isinstance(value, bool):
        raise ConfigError(f"skip_impossible={value}: expected true or false")
    return value


def _corners(overrides: Sequence[str]) -> list[list[str]]:
    """Jobs that a search may come to: each option at its ends. Empty for others' sweepers."""
    options = sweeper_options(overrides)
    if not str(options.get("_target_")).endswith(".OptunaSweeper"):
        return []
    try:
        _search_config(options, Path(OUTPUTS))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    space = split(options.get("params") or {}, overrides)
    if not space.distributions:
        raise ConfigError(
            "hydra/sweeper=optuna has nothing to search: name options with several values, "
            "as in algo.learning_rate=tag(log,interval(1e-4,1e-2))"
        )
    return list(space.corners())


def _job(composed: DictConfig) -> float:
    """One job, in whatever process the launcher gives it; what a sweeper may optimise."""
    from harness.execution import execute

    options = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(options, dict)
    hydra_config = HydraConfig.get()
    directory = Path(hydra_config.runtime.output_dir)
    try:
        plan = _plan(options, directory, list(hydra_config.overrides.task))
        if is_stopped(Path(hydra_config.sweep.dir), plan.stop_after_failures):
            _remove_if_empty(directory)
            return math.nan
        plan.trial = _trial(hydra_config)
        outcome = execute(plan)
    except ImpossiblePair:
        _remove_if_empty(directory)
        return math.nan
    except ConfigError as error:  # found too late to refuse the sweep; the other jobs go on
        run_dir = RunDir.open(directory, config=OmegaConf.to_yaml(composed), manifest={})
        run_dir.end("failed", summary={}, error=error)
        return math.nan
    if outcome.signum is not None:
        raise SystemExit(128 + outcome.signum)
    return outcome.objective


def _remove_if_empty(directory: Path) -> None:
    """Remove the directory that Hydra made for a job that does not run; keep one with files."""
    with suppress(OSError):
        directory.rmdir()


def _plan(options: dict[Any, Any], directory: Path, overrides: list[str]) -> RunPlan:
    plan = plan_from_options({str(k): v for k, v in options.items()}, directory, overrides)
    plan.sweep = sweep_name(directory.parent)
    return plan


def _trial(hydra_config: Any) -> Trial | None:
    """The job's line to the search that it belongs to, if it does."""
    options = OmegaConf.to_container(hydra_config.sweeper, resolve=True)
    assert isinstance(options, dict)
    number = options.pop("trial", None)
    if number is None:
        return None
    return Trial(_search_config(options, Path(hydra_config.sweep.dir)), int(number))


def _search_config(options: dict[Any, Any], folder: Path) -> SearchConfig:
    """What the sweeper's options say of its study."""
    known = {key: options[key] for key in options if key in SearchConfig.__dataclass_fields__}
    return SearchConfig(folder=folder, **known)


def sweep_name(folder: Path) -> str:
    """What groups the jobs of a sweep: its place below outputs/."""
    parts = folder.parts
    return "/".join(parts[parts.index(OUTPUTS) + 1 :]) if OUTPUTS in parts else folder.name


def report(folder: Path, num_jobs: int | None = None, limit: int | None = None) -> int:
    """Print how the jobs of a sweep ended; the exit status.

    limit: the sweep's `stop_after_failures`.
    """
    found = {file.parent: read_json(file) for file in sorted(folder.glob("*/status.json"))}
    states = {directory: _state(directory, status) for directory, status in found.items()}
    counts = Counter(states.values())
    if num_jobs is not None and num_jobs > len(found):
        counts["never started"] = num_jobs - len(found)
    print(f"{folder}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    if "never started" in counts and is_stopped(folder, limit):
        failed = failures(folder)
        print(f"  stop_after_failures={limit}: no job was started after {failed} failed")
    for directory, status in found.items():
        if states[directory] not in SOUND:
            error = " ".join(str(status.get("error") or "").split())[:LONGEST_ERROR]
            said = f": {error}" if error else ""
            print(f"  {states[directory]}: {directory}{said}", file=sys.stderr)
    return 0 if set(counts) <= SOUND else FAILED


def _state(directory: Path, status: dict[str, Any]) -> str:
    """The state, but that a run without a process is not running."""
    state = str(status.get("state"))
    return "died" if state == "running" and not RunDir(directory).is_alive() else state


def show_config(overrides: Sequence[str]) -> int:
    """Print what would be run, and run nothing."""
    print(plan_run(overrides).yaml, end="")
    return 0
