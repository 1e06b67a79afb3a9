"""A sweep: all jobs are checked before the first one starts, and counted at the end."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from harness.config.compose import task_overrides
from harness.config.explain import explained
from harness.config.plan import make_folder, plain, plan_from
from harness.config.space import split
from harness.environments.factory import single
from harness.files import read_json
from harness.options.errors import ConfigError, ImpossiblePair, require
from harness.options.run import Config
from harness.pipeline import spaces
from harness.run_dir import RunDir
from harness.search import SearchConfig, Trial
from harness.sweeps import failures, is_stopped

FAILED = 1
OUTPUTS = "outputs"
SOUND = {"done", "pruned"}
LONGEST_ERROR = 300
MANY_JOBS = 20  # to compose them takes seconds


class Sweep:
    """The jobs of one `--multirun`; config is what Hydra composed for the sweep as a whole."""

    def __init__(self, config: DictConfig):
        self.config = config
        self.folder = Path(str(config.hydra.sweep.dir))
        self.num_jobs: int | None = None  # as far as that is known before
        self._loader = GlobalHydra.instance().config_loader()
        self._given = task_overrides(config.hydra)

    def check(self) -> None:
        """Raise `ConfigError` if a job cannot work, or nothing can be written."""
        if self.config.get("resume"):
            raise ConfigError(
                f"resume={self.config.resume} with --multirun: a sweep starts new runs; "
                "resume each of its runs in a command of its own"
            )
        if self.config.hydra.runtime.choices.get("hydra/sweeper") == "optuna":
            require("hydra/sweeper=optuna", "optuna", "optuna")
        jobs, searches = self._jobs()
        planned = self._plan(jobs)
        self.num_jobs = None if searches else planned
        self._name_jobs()
        make_folder(self.folder)

    def _jobs(self) -> tuple[list[list[str]], bool]:
        """The overrides of each job; for a search, of the ends of its space."""
        sweeper = OmegaConf.to_container(self.config.hydra.sweeper, resolve=True)
        assert isinstance(sweeper, dict)
        choice = self.config.hydra.runtime.choices.get("hydra/sweeper")
        params = sweeper.get("params") or {}
        if choice == "basic":
            return jobs_of(params, self._given, self._loader), False
        if choice != "optuna":
            return [], True  # another package's: only it knows what it will try
        try:
            search_config(sweeper, self.folder)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        space = split(params, self._given)
        if not space.distributions:
            raise ConfigError(
                "hydra/sweeper=optuna has nothing to search: name options with several values, "
                "as in algo.learning_rate=tag(log,interval(1e-4,1e-2))"
            )
        return list(space.corners()), True

    def _plan(self, jobs: list[list[str]]) -> int:
        """Plan every job, and name those that are left out; how many there are."""
        planned, left_out = 0, {}
        jobs_by_env: dict[str, Config] = {}
        choices = self.config.hydra.runtime.choices
        if len(jobs) >= MANY_JOBS:
            print(f"checking {len(jobs)} jobs before the first one starts", flush=True)
        for job in jobs:
            try:
                with explained(job):
                    composed = self._loader.load_sweep_config(self.config, job)
                    plan = plan_from(composed, self.folder / "job", job)
                    check_launcher(str(choices.get("hydra/launcher")), plan.config)
                jobs_by_env.setdefault(repr(single(plan.config.env)), plan.config)
                planned += 1
            except ImpossiblePair as error:
                if not plain(composed).get("skip_impossible"):
                    raise ImpossiblePair(
                        f"{error} (in the job {' '.join(job)}; skip_impossible=true skips it)"
                    ) from None
                left_out[str(error)] = error
            except ConfigError as error:
                raise ConfigError(f"{error} (in the job {' '.join(job)})") from None
        if left_out and not planned:
            raise next(iter(left_out.values()))
        _check_environments(list(jobs_by_env.values()))
        for reason in left_out:
            print(f"skipped: {reason}")
        return planned

    def _name_jobs(self) -> None:
        """Let jobs be named by what the sweep varies, and not by what all have in common."""
        fixed = ",".join(fixed_keys(self._given))
        keys = f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]"
        with open_dict(self.config):
            self.config.hydra.overrides.hydra.append(keys)

    def report(self) -> int:
        """Say how the jobs ended; the exit status."""
        folder = self.folder
        found = {file.parent: read_json(file) for file in sorted(folder.glob("*/status.json"))}
        states = {directory: _state(directory, status) for directory, status in found.items()}
        counts = Counter(states.values())
        if self.num_jobs is not None and self.num_jobs > len(found):
            counts["never started"] = self.num_jobs - len(found)
        print(f"{folder}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
        limit = self.config.get("stop_after_failures")
        if "never started" in counts and is_stopped(folder, limit):
            failed = failures(folder)
            print(f"  stop_after_failures={limit}: no job was started after {failed} failed")
        for directory, status in found.items():
            if states[directory] not in SOUND:
                error = " ".join(str(status.get("error") or "").split())[:LONGEST_ERROR]
                said = f": {error}" if error else ""
                print(f"  {states[directory]}: {directory}{said}", file=sys.stderr)
        return 0 if set(counts) <= SOUND else FAILED

    @staticmethod
    def name_of(folder: Path) -> str:
        """What groups the jobs of a sweep: its place below outputs/."""
        parts = folder.parts
        return "/".join(parts[parts.index(OUTPUTS) + 1 :]) if OUTPUTS in parts else folder.name


def _check_environments(jobs: Sequence[Config]) -> None:
    """Raise `ConfigError` if no job's environment can be made; a job alone fails by itself.

    jobs: one of each environment.
    """
    errors = []
    for job in jobs:
        try:
            spaces(job)
            return
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def jobs_of(
    params: Mapping[str, Any], overrides: Sequence[str], loader: ConfigLoader | None = None
) -> list[list[str]]:
    """The overrides of each job: every combination of the values that options are given.

    params: those of a sweeper's config; what the command line says about an option wins.
    """
    given = [f"{key}={value}" for key, value in params.items()]
    parser = OverridesParser.create(config_loader=loader)
    columns = {}
    for override in parser.parse_overrides([*given, *overrides]):
        key = override.get_key_element()
        if override.is_discrete_sweep():
            columns[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        elif override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: a sweep needs single values, as in 1e-4,1e-3; "
                "hydra/sweeper=optuna draws from an interval"
            )
        else:
            columns[key] = [override.input_line or ""]
    return [list(job) for job in itertools.product(*columns.values())]


def fixed_keys(overrides: Sequence[str]) -> list[str]:
    """The options that are given one value for all jobs."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [override.key_or_group for override in parsed if not override.is_sweep_override()]


def _state(directory: Path, status: dict[str, Any]) -> str:
    """The state, but that a run without a process is not running."""
    state = str(status.get("state"))
    return "died" if state == "running" and not RunDir(directory).is_alive() else state


def check_launcher(launcher: str, job: Config) -> None:
    """Raise `ConfigError` for a launcher in whose processes a job cannot run."""
    if launcher != "joblib":
        return
    workers = f"collector={job.collector.name}" if job.collector.name != "single" else ""
    vector = "env.vectorisation=async" if job.env.vectorisation == "async" else ""
    if workers or vector:
        raise ConfigError(
            f"hydra/launcher=joblib {workers or vector}: joblib's processes start others in a way "
            "of its own, in which no worker comes up; take hydra/launcher=local"
        )


def trial_of(hydra_config: Any) -> Trial | None:
    """The job's connection to the search that it belongs to, if it does."""
    options = OmegaConf.to_container(hydra_config.sweeper, resolve=True)
    assert isinstance(options, dict)
    number = options.pop("trial", None)
    if number is None:
        return None
    return Trial(search_config(options, Path(hydra_config.sweep.dir)), int(number))


def search_config(options: dict[Any, Any], folder: Path) -> SearchConfig:
    """What the sweeper's options say of its study."""
    known = {key: options[key] for key in options if key in SearchConfig.__dataclass_fields__}
    return SearchConfig(folder=folder, **known)
