"""The command: one run, or a sweep, or a look at the config.

main               reads the flags; imports plugins and stores options for Hydra
  resume=RUN       the stored config of the run, without Hydra
  one run          composed by Hydra's compose API, planned and run
  anything else    Hydra's own command: a sweep, --cfg, --info, completion of options
    on_multirun_start   `CheckFirst` plans every job of a sweep before the first one starts
    job                 one job of the sweep, in any process
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import hydra
from hydra import compose
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config.compose import CONF, HYDRA_VERSION, Place, quoted, resumed_run, task_overrides
from harness.config.explain import explain, explained
from harness.errors import ConfigError, ImpossiblePair

if TYPE_CHECKING:
    from harness.config.plan import RunPlan
    from harness.sweep.sweep import Sweep

USAGE_ERROR, UNREAD = 2, 141
AGENTS = re.compile(r"--(?!(?:cfg|package|info|help)=)[\w./@]+=")  # less Hydra's own flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _complete(arguments) if is_query(arguments) else _command(arguments)
        print(end="", flush=True)
        return status
    except ConfigError as error:
        return _refuse(error)
    except BrokenPipeError:  # the reader has closed the pipe: `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def is_query(arguments: Sequence[str]) -> bool:
    """Whether a shell asks how a line may go on."""
    flags = {"-sc", "--shell-completion"}
    return not flags.isdisjoint(arguments) and any(text.startswith("query=") for text in arguments)


def _complete(arguments: list[str]) -> int:
    """Print how the line of a shell may go on: as we know, and as Hydra knows."""
    from harness.config.completion import completions

    names, is_ours = completions(os.environ["COMP_LINE"])
    print("".join(f"{name}\n" for name in names), end="")
    if not is_ours:
        with suppress(ConfigError):  # it would be printed into the line
            _command(arguments)
    return 0


def _refuse(error: ConfigError) -> int:
    """Say in one line what is wrong; the exit status."""
    print(f"lockstep: {error}", file=sys.stderr)
    return USAGE_ERROR


def _command(arguments: list[str]) -> int:
    # A W&B agent types seed=1 as --seed=1.
    arguments = [text.removeprefix("--") if AGENTS.match(text) else text for text in arguments]
    flags, rest = _flags().parse_known_args(arguments)
    if flags.version:
        print(f"lockstep {version()}")
        return 0
    sweeps = not {"-m", "--multirun", "hydra.mode=MULTIRUN"}.isdisjoint(rest)
    rest = quoted(rest, sweeps=sweeps)
    overrides = [text for text in rest if not text.startswith("-")]
    of_hydra = [text for text in rest if text.startswith("-") and text not in ("-r", "--run")]
    place = Place(
        Path(flags.config_path).absolute() if flags.config_path else CONF,
        flags.config_name or "config",
        Path(flags.config_dir) if flags.config_dir else None,
    )
    if flags.help:
        from harness.config.help import page

        topics = [text for text in overrides if "=" not in text]
        with explained(overrides):
            place.import_plugins(overrides)
            text = page(topics[0] if topics else None, flags.config_dir)
        print(text)
        return 0
    with explained(overrides):
        place.prepare(overrides)
    if not of_hydra and not sweeps:
        directory = resumed_run(overrides)
        if directory is not None and flags.cfg in (None, "job"):
            return _resume(directory, overrides, cfg=flags.cfg)
        if not flags.cfg and (status := _run_one(place, overrides)) is not None:
            return status
    # Also those that `Place` has dealt with: what was typed is told from sys.argv.
    for name in ("cfg", "package", "config-dir", "config-path", "config-name"):
        if (value := getattr(flags, name.replace("-", "_"))) is not None:
            rest += [f"--{name}", value]
    return _leave_to_hydra(place, rest, overrides)


def _flags() -> argparse.ArgumentParser:
    """The flags that are read here, or whose values look like overrides."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--package", "-p")
    parser.add_argument("--cfg", "-c")
    return parser


def version() -> str:
    """Of the installed package."""
    try:
        return metadata.version("lockstep-rl")
    except metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


# -- one run


def _resume(directory: Path, overrides: list[str], *, cfg: str | None) -> int:
    """Continue a run, or show the config with which it would go on."""
    from harness.config.plan import resumed_plan

    plan = resumed_plan(directory, overrides)
    if cfg is not None:
        print(plan.yaml)
        return 0
    return _run(plan)


def _run_one(place: Place, overrides: list[str]) -> int | None:
    """One run by Hydra's compose API; its exit status. None if this is a sweep."""
    from harness.config.plan import make_folder, plan_from

    with place.opened():
        try:
            with _hydra_errors(overrides):
                composed = compose(place.name, overrides, return_hydra_config=True)
        except ConfigError as error:
            if isinstance(error.__cause__, HydraException) and "--multirun" in str(error.__cause__):
                return None  # Hydra knows whether the config makes it a sweep, or else refuses it
            raise
        if composed.hydra.mode == RunMode.MULTIRUN:
            return None
        plan = plan_from(composed, composed.hydra.run.dir, overrides)
        plan.directory = plan.directory.absolute()  # the run may change into it
        make_folder(plan.directory)
        plan.check_directory()
        return _as_job_of_hydra(plan, composed)


def _as_job_of_hydra(plan: RunPlan, composed: DictConfig) -> int:
    """Run with what Hydra's own settings ask for: callbacks, logging, variables, directories."""
    status = 0

    def task(_: DictConfig) -> None:
        nonlocal status
        status = _run(plan)
        if status:
            raise RunFailed  # so that callbacks see it

    composed.hydra.mode = RunMode.RUN
    callbacks = Callbacks(composed)
    callbacks.on_run_start(config=composed)
    job = run_job(
        task_function=task,
        config=composed,
        job_dir_key="hydra.run.dir",
        job_subdir_key=None,
        hydra_context=HydraContext(GlobalHydra.instance().config_loader(), callbacks),
    )
    callbacks.on_run_end(config=composed, job_return=job)
    return status


class RunFailed(RuntimeError):
    """A run did not succeed, and has said why."""


def _run(plan: RunPlan) -> int:
    """Do one run; its exit status."""
    from harness.run.run_lifetime import execute

    try:
        outcome = execute(plan)
    except ConfigError as error:
        no_run(plan.directory)
        return _refuse(error)
    return outcome.exit_status


def no_run(directory: Path) -> float:
    """Remove the empty directory that was created for a run that does not start."""
    with suppress(OSError):
        directory.rmdir()
    return math.nan


# -- a sweep, and everything else that Hydra does


def _leave_to_hydra(place: Place, arguments: list[str], overrides: list[str]) -> int:
    status, CheckFirst.sweep = 0, None
    command = hydra.main(str(place.conf), place.name, HYDRA_VERSION)(job)
    with _hydra_errors(overrides), _arguments(arguments):
        try:
            command()
        except SystemExit as ended:  # Hydra's own, of an unknown flag say, or a signal's
            status = ended.code if isinstance(ended.code, int) else 1
        finally:
            if CheckFirst.sweep is not None:
                status_of_jobs = CheckFirst.sweep.report()
                status = status or status_of_jobs
    return status


def job(composed: DictConfig) -> float:
    """One job of a sweep, in any process; what a sweeper optimises."""
    from harness.config.plan import plan_from
    from harness.run.run_lifetime import collects_for_another, execute
    from harness.run_directory import RunDir
    from harness.sweep.progress import is_stopped
    from harness.sweep.sweep import Sweep, trial_of

    config = HydraConfig.get()
    directory = Path(config.runtime.output_dir)
    sweeps = config.mode == RunMode.MULTIRUN  # else it is a run from Hydra's pickle
    try:
        plan = plan_from(composed, directory, task_overrides(config))
        if sweeps:
            if is_stopped(Path(config.sweep.dir), plan.stop_after_failures):
                return no_run(directory)
            plan.trial = trial_of(config)
            plan.sweep = Sweep.name_of(directory.parent)
        outcome = execute(plan)
    except ConfigError as error:
        no_run(directory)
        if not sweeps:
            raise
        # It is too late to refuse the whole sweep: the other jobs continue.
        if not isinstance(error, ImpossiblePair):
            RunDir.record_failure(directory, config=OmegaConf.to_yaml(composed), error=error)
        return math.nan
    finally:
        if CheckFirst.sweep is not None:  # the sweep is in this process, too
            CheckFirst.sweep.progress.look()
    if outcome.signum is not None:
        raise SystemExit(128 + outcome.signum)
    if outcome.exit_status and (not sweeps or collects_for_another(plan.config)):
        raise SystemExit(outcome.exit_status)
    return outcome.objective


class CheckFirst(Callback):
    """Refuses a sweep with invalid jobs before Hydra creates a directory or starts one."""

    sweep: ClassVar[Sweep | None] = None  # of this process

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from harness.sweep.sweep import Sweep

        try:
            with explained(task_overrides(config.hydra)):
                sweep = Sweep(config)
                sweep.check()
        except ConfigError as error:
            # Hydra turns exceptions of its callbacks into warnings, but not SystemExit.
            raise SystemExit(_refuse(error)) from None
        CheckFirst.sweep = sweep
        sweep.start()


@contextmanager
def _hydra_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Raise Hydra's errors as a `ConfigError`, unless a person has set HYDRA_FULL_ERROR.

    Hydra would print them and end the process.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        yield
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    except ConfigError:
        raise
    # Flags that contradict each other are a ValueError.
    except (HydraException, OmegaConfBaseException, YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(explain(error, overrides)) from error
    finally:
        del os.environ["HYDRA_FULL_ERROR"]


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    """Let Hydra find these on the command line."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before
