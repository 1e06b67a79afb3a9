"""A sweep: all jobs are checked before the first one starts, and counted at the end."""

from __future__ import annotations

import pickle
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from collectors.rollout.seeds import untouched_streams
from harness.config.compose import task_overrides
from harness.config.explain import explained
from harness.config.plan import RunPlan, make_folder, plain, plan_from
from harness.environments.factory import single
from harness.errors import ConfigError, ImpossiblePair, require
from harness.logging.display import program
from harness.options.run import Config
from harness.run.build import make_learner
from harness.run.provenance import command
from harness.run_directory import RunDir
from harness.sweep.progress import NEVER_STARTED, Progress, failures, is_stopped
from harness.sweep.search import SearchConfig, Trial, split

FAILED = 1
OUTPUTS = "outputs"
SOUND = {"done", "pruned"}
LONGEST_ERROR = 300
MANY_JOBS = 20  # to compose them takes seconds


class JobLoader(ConfigLoaderImpl):
    """Composes what jobs have in common only once: those with the same parts differ in values.

    Hydra sets the values of options after it has put the parts together, and so does this, in a
    copy. The check before the first job, the sweeper and the launcher each ask for every job.
    """

    def __init__(self, search_path: ConfigSearchPath):
        super().__init__(search_path)
        self._composed: dict[tuple[str | None, ...], bytes] = {}  # by parts, pickled
        self._places: IConfigRepository | None = None  # of config files

    def _load_configuration_impl(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """The config of a job, a copy for each call."""
        parsed = OverridesParser.create().parse_overrides(overrides)
        if validate_sweep_overrides:
            self.validate_sweep_overrides_legal(parsed, run_mode, from_shell)
        of_task = [one for one in parsed if not one.is_hydra_override()]
        if self._places is None:  # Hydra's own options, which jobs share, may add some
            _, self._places = self._parse_overrides_and_create_caching_repo(config_name, overrides)
        values = [
            one
            for one in of_task
            if isinstance(one.value(), dict) or not self._places.group_exists(one.key_or_group)
        ]
        texts = {one.input_line for one in values}
        parts = [text for text in overrides if text not in texts]
        key = (config_name, *parts)
        if key not in self._composed:
            self._composed[key] = pickle.dumps(
                super()._load_configuration_impl(config_name, parts, run_mode, from_shell)
            )
        config: DictConfig = pickle.loads(self._composed[key])
        self._apply_overrides_to_config(values, config)
        job = config.hydra.job
        config.hydra.overrides.task = [one.input_line for one in of_task]
        job.override_dirname = get_overrides_dirname(of_task, **job.config.override_dirname)
        return config


class Sweep:
    """The jobs of one `--multirun`; config is what Hydra composed for the sweep as a whole."""

    def __init__(self, config: DictConfig):
        self.config = config
        self.folder = Path(str(config.hydra.sweep.dir))
        self.progress = Progress(self.folder)
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        self._loader = JobLoader(hydra.config_loader.get_search_path())
        hydra.config_loader = self._loader  # sweepers and launchers get it from there
        self._choices = config.hydra.runtime.choices
        self._searches = self._choices.get("hydra/sweeper") != "basic"

    def check(self) -> None:
        """Raise `ConfigError` if a job cannot work, or nothing can be written."""
        if self.config.get("resume"):
            raise ConfigError(
                f"resume={self.config.resume} with --multirun: a sweep starts new runs; "
                "resume each of its runs in a command of its own"
            )
        if self._choices.get("hydra/sweeper") == "optuna":
            require("hydra/sweeper=optuna", "optuna", "optuna")
        if not self._searches:
            self._drop_repeated_values()
        self._name_jobs()
        plans = self._plan(self._jobs())
        make_folder(self.folder)
        if not self._searches:
            self.progress = self._begin(plans)

    def start(self) -> None:
        """Say what will be done, and print a line when a job ends.

        A job in this process says itself that it has ended.
        """
        if not self._searches:
            parallel = self.config.hydra.launcher.get("parallel") or 1
            print(self.progress.plan(parallel), flush=True)
        launcher = self._choices.get("hydra/launcher")
        if launcher != "basic":  # jobs of others than `local` may draw on the terminal themselves
            console = Console(highlight=False) if launcher == "local" else None
            self.progress.start(console=console)

    def _jobs(self) -> list[list[str]]:
        """The overrides of each job; for a search, of the ends of its space."""
        sweeper = OmegaConf.to_container(self.config.hydra.sweeper, resolve=True)
        assert isinstance(sweeper, dict)
        choice = self._choices.get("hydra/sweeper")
        params = sweeper.get("params") or {}
        overrides = task_overrides(self.config.hydra)
        if choice == "basic":
            return jobs_of(params, overrides, self._loader)
        if choice != "optuna":
            return []  # another package's: only it knows what it will try
        try:
            search_config(sweeper, self.folder)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        space = split(params, overrides)
        if not space.distributions:
            raise ConfigError(
                "hydra/sweeper=optuna has nothing to search: name options with several values, "
                "as in algo.learning_rate=tag(log,interval(1e-4,1e-2))"
            )
        return list(space.corners())

    def _plan(self, jobs: list[list[str]]) -> list[RunPlan]:
        """Plan every job that can be, and say which are left out."""
        plans: list[RunPlan] = []
        left_out: dict[str, ImpossiblePair] = {}
        fits: set[str] = set()  # environments, algorithms and models that were tried together
        if len(jobs) >= MANY_JOBS:
            print(f"checking {len(jobs)} jobs before the first one starts", flush=True)
        for number, job in enumerate(jobs):
            try:
                with explained(job):
                    composed = self._compose(job, number)
                    sweep = composed.hydra.sweep
                    plan = plan_from(composed, Path(sweep.dir) / str(sweep.subdir), job)
                check_launcher(str(self._choices.get("hydra/launcher")), plan.config)
                check_learner(plan.config, fits)
                plans.append(plan)
            except ImpossiblePair as error:
                if not plain(composed).get("skip_impossible"):
                    raise ImpossiblePair(
                        f"{error} (in the job {' '.join(job)}; skip_impossible=true skips it)"
                    ) from None
                left_out[str(error)] = error
            except ConfigError as error:
                raise ConfigError(f"{error} (in the job {' '.join(job)})") from None
        if left_out and not plans:
            raise next(iter(left_out.values()))
        for reason in left_out:
            print(f"skipped: {reason}")
        return plans

    def _compose(self, job: list[str], number: int) -> DictConfig:
        """The config of a job as its launcher will compose it."""
        composed = self._loader.load_sweep_config(self.config, job)
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(number), number
        return composed

    def _begin(self, plans: Sequence[RunPlan]) -> Progress:
        """Watch the jobs' directories; `ConfigError` if a run in one of them is in the way."""
        by_directory: dict[Path, RunPlan] = {}
        for plan in plans:
            other = by_directory.setdefault(plan.directory, plan)
            if other is not plan:
                raise ConfigError(
                    f"two jobs would write to {plan.directory}: {' '.join(other.overrides)} and "
                    f"{' '.join(plan.overrides)}"
                )
            if (owner := RunDir(plan.directory).owner()) is not None:
                raise ConfigError(owner)
            plan.check_directory()
        skipped = [plan.directory for plan in plans if plan.is_skipped]
        return Progress(self.folder, list(by_directory), skipped)

    def _drop_repeated_values(self) -> None:
        """Let a value that an option lists twice make one job: `seed=1,1`."""
        hydra = self.config.hydra
        parser = OverridesParser.create(config_loader=self._loader)

        def once(text: str) -> str:
            (override,) = parser.parse_overrides([text])
            if not override.is_discrete_sweep():
                return text
            values = list(override.sweep_string_iterator())
            if len(set(values)) == len(values):
                return text
            print(f"{text}: a value that is listed twice makes one job", flush=True)
            return f"{override.get_key_element()}={','.join(dict.fromkeys(values))}"

        with open_dict(self.config):
            hydra.overrides.task = [once(text) for text in task_overrides(hydra)]
            params = OmegaConf.to_container(hydra.sweeper.get("params") or OmegaConf.create())
            assert isinstance(params, dict)
            for key, value in ((str(key), value) for key, value in params.items()):
                hydra.sweeper.params[key] = once(f"{key}={value}").partition("=")[2]

    def _name_jobs(self) -> None:
        """Let jobs be named by what the sweep varies, and not by what all have in common.

        Their seeds are added by `job_name`.
        """
        fixed = ",".join([*fixed_keys(task_overrides(self.config.hydra)), "seed"])
        keys = f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]"
        with open_dict(self.config):
            self.config.hydra.overrides.hydra.append(keys)

    def report(self) -> int:
        """Say how the jobs ended, and how to go on; the exit status."""
        self.progress.stop()
        states = self.progress.states()
        counts = Counter(states.values())
        are_over = set(counts) <= {*SOUND, "failed"}
        if counts and are_over and not self._searches and (verdict := verdict_on(self.folder)):
            print(f"\n{verdict}\n")
        words = [f"{count} {state}" for state, count in counts.items()] or ["no job was left to do"]
        print(f"{self.folder}: {', '.join(words)}")
        limit = self.config.get("stop_after_failures")
        if NEVER_STARTED in counts and is_stopped(self.folder, limit):
            failed = failures(self.folder)
            print(f"  stop_after_failures={limit}: no job was started after {failed} failed")
        for directory, state in states.items():
            if state not in {*SOUND, NEVER_STARTED}:
                error = " ".join(self.progress.error(directory).split())[:LONGEST_ERROR]
                reason = f": {error}" if error else ""
                print(f"  {state}: {directory}{reason}", file=sys.stderr)
        if not are_over:
            print(f"the rest:  {self._command_for_the_rest()}")
        elif counts:
            print(f"report:    {program()} report {shlex.quote(str(self.folder))}")
        return 0 if set(counts) <= SOUND else FAILED

    def _command_for_the_rest(self) -> str:
        """The command that runs the jobs that are missing."""
        added = []
        if not self._searches and not self.config.get("skip_done"):
            added.append("skip_done=true")
        if not any(text.startswith("sweep=") for text in task_overrides(self.config.hydra)):
            added.append(f"sweep={self.config.sweep}")  # which may hold the time
        return " ".join([command(), *map(shlex.quote, added)])

    @staticmethod
    def name_of(folder: Path) -> str:
        """What groups the jobs of a sweep: its place below outputs/."""
        parts = folder.parts
        return "/".join(parts[parts.index(OUTPUTS) + 1 :]) if OUTPUTS in parts else folder.name


def verdict_on(folder: Path) -> str:
    """What the report on a sweep says first; empty if nothing is compared, or cannot be read."""
    from harness.report.make import results  # takes time to import

    try:
        return results(folder)
    except (ValueError, OSError) as error:
        return f"no verdict: {error}"


def check_learner(config: Config, fits: set[str]) -> None:
    """Raise `ConfigError` if the environment cannot be made or the model does not fit it.

    fits: what was tried before, and is not tried again.
    """
    parts = repr((single(config.env), config.algo, config.model))
    if parts not in fits:
        with untouched_streams():
            make_learner(replace(config, device="cpu"))
        fits.add(parts)


def jobs_of(
    params: Mapping[str, Any], overrides: Sequence[str], loader: ConfigLoader | None = None
) -> list[list[str]]:
    """The overrides of each job: every combination of the values that options are given.

    params: those of a sweeper's config; what the command line says about an option wins.
    """
    from_config = [f"{key}={value}" for key, value in params.items()]
    parser = OverridesParser.create(config_loader=loader)
    parsed = parser.parse_overrides([*from_config, *overrides])
    for override in parsed:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line}: a sweep needs single values, as in 1e-4,1e-3; "
                "hydra/sweeper=optuna draws from an interval"
            )
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    return jobs


def fixed_keys(overrides: Sequence[str]) -> list[str]:
    """The options that are given one value for all jobs."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [override.key_or_group for override in parsed if not override.is_sweep_override()]


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
    of_study = {key: options[key] for key in options if key in SearchConfig.__dataclass_fields__}
    return SearchConfig(folder=folder, **of_study)
