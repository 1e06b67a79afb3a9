"""The command: a Hydra application with a check before anything starts.

main                  plugins are imported, options stored; then Hydra takes over
Hydra                 parses the command line, composes, and calls back before a run or a sweep:
  on_run_start        `CheckFirst` plans the run; what cannot work is one line, exit status 2
  on_multirun_start   the same for every job of the sweep, before the first one starts
  application         one run, or one job of a sweep
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
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config.compose import prepare, quoted, task_overrides
from harness.config.explain import explain, explained
from harness.config.help import page
from harness.config.sources import import_plugins
from harness.config.store import CONF, HYDRA_VERSION
from harness.options.errors import ConfigError, ImpossiblePair

USAGE_ERROR, UNREAD = 2, 141
AGENTS = re.compile(r"--(?!(?:cfg|package|info|help)=)[\w./@]+=")  # less Hydra's own flags


class Status:
    """How the runs of this process ended, for the command's exit status."""

    run: int = 0
    sweep: Any = None  # the `Sweep`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        status = _command(_overrides(sys.argv[1:] if arguments is None else arguments))
        print(end="", flush=True)
        return status
    except ConfigError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # the reader has closed the pipe: `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _overrides(arguments: Sequence[str]) -> list[str]:
    """The arguments as Hydra takes them: `--seed=1`, as a W&B agent types it, is `seed=1`."""
    return quoted([text.removeprefix("--") if AGENTS.match(text) else text for text in arguments])


def _command(arguments: list[str]) -> int:
    flags, overrides = _flags().parse_known_args(arguments)
    overrides = [text for text in overrides if not text.startswith("-")]
    Status.run, Status.sweep = 0, None
    if flags.version:
        print(f"lockstep {version()}")
        return 0
    if flags.help and (topics := [text for text in overrides if "=" not in text]):
        with explained(overrides):
            import_plugins(overrides, folders=[flags.config_dir, flags.config_path])
            text = page(topics[0], flags.config_dir)
        print(text)
        return 0
    with explained(overrides):
        config_name = prepare(
            overrides,
            folders=[flags.config_dir, flags.config_path],
            config_name=flags.config_name,
        )
    with _hydra_errors(overrides), _arguments(arguments):
        run = hydra.main(
            version_base=HYDRA_VERSION, config_path=str(CONF), config_name=config_name
        )(application)
        try:
            run()
        except SystemExit as ended:  # Hydra's own, of an unknown flag say, or a signal's
            Status.run = ended.code if isinstance(ended.code, int) else 1
        except RunFailed as failed:
            Status.run = failed.exit_status
        finally:
            if Status.sweep is not None:
                status = Status.sweep.report()
                Status.run = Status.run or status
    return Status.run


def _flags() -> argparse.ArgumentParser:
    """Hydra's flags that are needed before Hydra itself parses them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    for name in (("--package", "-p"), ("--cfg", "-c")):  # so that their values are no overrides
        parser.add_argument(*name)
    return parser


def version() -> str:
    """Of the installed package."""
    try:
        return metadata.version("lockstep")
    except metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


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


def manual() -> str:
    """The page that --help shows, fit for a template of Hydra's."""
    return page().replace("$", "$$")


OmegaConf.register_new_resolver("lockstep.manual", manual, replace=True)


class RunFailed(RuntimeError):
    """A single run did not succeed; it has already printed why."""

    def __init__(self, state: str, exit_status: int):
        self.exit_status = exit_status
        super().__init__(f"the run is {state}")


def application(composed: DictConfig) -> float:
    """One run, or one job of a sweep, in any process; what a sweeper optimises."""
    from harness.config.plan import plan_from
    from harness.config.sweep import Sweep, trial_of
    from harness.execution import execute
    from harness.ranks import collects_for_another
    from harness.run_dir import RunDir
    from harness.sweeps import is_stopped

    found = HydraConfig.get()
    directory = Path(found.runtime.output_dir)
    sweeps = found.mode == RunMode.MULTIRUN
    try:
        plan = plan_from(composed, directory, task_overrides(found))
        if sweeps:
            if is_stopped(Path(found.sweep.dir), plan.stop_after_failures):
                return no_run(directory)
            plan.trial = trial_of(found)
            plan.sweep = Sweep.name_of(directory.parent)
        outcome = execute(plan)
    except ConfigError as error:
        no_run(directory)
        if not sweeps:
            print(f"lockstep: {error}", file=sys.stderr)
            raise SystemExit(USAGE_ERROR) from None
        if isinstance(error, ImpossiblePair):
            return math.nan
        # It is too late to refuse the whole sweep: the other jobs continue.
        RunDir.record_failure(directory, config=OmegaConf.to_yaml(composed), error=error)
        return math.nan
    finally:
        if Status.sweep is not None:  # the sweep is in this process, too
            Status.sweep.progress.look()
    if outcome.signum is not None:
        raise SystemExit(128 + outcome.signum)
    if outcome.exit_status and collects_for_another(plan.config):
        raise SystemExit(outcome.exit_status)
    if outcome.exit_status and not sweeps:
        raise RunFailed(outcome.state, outcome.exit_status)
    return outcome.objective


def no_run(directory: Path) -> float:
    """Remove the empty directory that Hydra created for a run that does not start."""
    with suppress(OSError):
        directory.rmdir()
    return math.nan


class CheckFirst(Callback):
    """Refuses invalid configs before Hydra creates a directory or starts a job."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        from harness.config.plan import make_folder, plan_from

        overrides = task_overrides(config.hydra)
        with refused(overrides):
            plan = plan_from(config, config.hydra.run.dir, overrides)
            if not plan.resume:
                make_folder(plan.directory)
                plan.check_directory()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from harness.config.sweep import Sweep

        with refused(task_overrides(config.hydra)):
            sweep = Sweep(config)
            sweep.check()
            Status.sweep = sweep
            sweep.start()


@contextmanager
def refused(overrides: Sequence[str]) -> Iterator[None]:
    """End the process with one line that says what is wrong.

    Hydra turns exceptions of its callbacks into warnings, but not SystemExit.
    """
    try:
        with explained(overrides):
            yield
    except ConfigError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None
