"""The plan of a run: its composed config, typed and checked, and its directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from collectors.options.check_types import hints
from harness.callbacks import Callback
from harness.config.compose import Place, quoted, resumed_run
from harness.config.explain import explained
from harness.environments.factory import check_environment, find
from harness.errors import ConfigError
from harness.files import to_yaml
from harness.options.base import build, in_types
from harness.options.run import CommandConfig, Config, RunConfig
from harness.registry import (
    Registry,
    algorithms,
    callbacks,
    collectors,
    load_plugins,
    loggers,
    models,
    schemes,
)
from harness.run_directory import RunDir


class TrialInterface(Protocol):
    """A search's part in a run that it has started: see harness/sweep/search.py."""

    def report(self, step: int, value: float, *, final: bool = False) -> None:
        """Record an evaluation; raise `Pruned` if the run is to end here."""


class BranchStart(Protocol):
    """The saved state of another run from which a run goes on: see harness/run/branch_start.py."""

    @property
    def start(self) -> Path:
        """The folder that holds the state."""

    @property
    def origin(self) -> dict[str, Any]:
        """Which moment of which run it is, as the manifest says it."""

    def load(self, config: Config) -> tuple[int, dict[str, Any]]:
        """The frames so far, and the state with the random streams of `config.seed`."""


@dataclass
class RunPlan:
    """A run that was checked before anything is started."""

    config: Config
    options: dict[str, Any]  # the same, plain, as stored in config.yaml
    directory: Path
    overrides: list[str]
    resume: bool = False
    skip_done: bool = False
    replace_done: bool = False
    stop_after_failures: int | None = None  # of the sweep's jobs
    sweep: str | None = None
    trial: TrialInterface | None = None  # of a search
    branch: BranchStart | None = None
    watchers: Sequence[Callback] = ()  # called like the callbacks of the config

    @property
    def yaml(self) -> str:
        """The options as config.yaml holds them."""
        return to_yaml(self.options)

    @property
    def is_skipped(self) -> bool:
        """Whether the run is done already and need not be done again."""
        return self.skip_done and RunDir(self.directory).is_done_with(self.yaml)

    def check_directory(self) -> None:
        """Raise `ConfigError` if a finished run that is to stay is in the way of this one."""
        if not self.is_skipped:
            RunDir(self.directory).check_free(self.yaml, replace_done=self.replace_done)


def plan_run(overrides: Sequence[str]) -> RunPlan:
    """The plan of the run that the command would do; `ConfigError` if it cannot be."""
    overrides, place = quoted(overrides), Place()
    with explained(overrides):
        place.prepare(overrides)
        if (directory := resumed_run(overrides)) is not None:
            return resumed_plan(directory, overrides)
        composed = place.compose(overrides)
        return plan_from(composed, composed.hydra.run.dir, overrides)


def plan_from(composed: DictConfig, directory: Any, overrides: list[str]) -> RunPlan:
    """The plan of one run that is composed already."""
    with explained(overrides):
        options = plain(composed)
        names = CommandConfig.__dataclass_fields__
        command = build(CommandConfig, {key: options.pop(key) for key in names if key in options})
        if not isinstance(directory, str | Path) or not Path(directory).name:
            raise ConfigError(f"hydra.run.dir={directory!r}: expected the path of a directory")
        if command.resume is not None:
            raise ConfigError(
                f"resume={command.resume} in a config file: a run is resumed with its own "
                f"config; give resume={command.resume} on the command line"
            )
        if replay_of(options):
            from harness.config.replay import follow_recording

            follow_recording(options, overrides)
        return _plan(options, command, Path(directory), overrides)


def resumed_plan(directory: Path, overrides: list[str]) -> RunPlan:
    """The plan of a run that goes on with its own config, and the changes that overrides make."""
    from harness.config.stored import resumed_options

    with explained(overrides):
        options, command = resumed_options(directory, overrides)
        return _plan(options, build(CommandConfig, command), directory, overrides)


def _plan(
    options: dict[str, Any], command: CommandConfig, directory: Path, overrides: list[str]
) -> RunPlan:
    config = to_config(options)
    return RunPlan(
        config=config,
        options=in_types(options, config),
        directory=directory,
        overrides=overrides,
        resume=command.resume is not None,
        skip_done=command.skip_done,
        replace_done=command.replace_done,
        stop_after_failures=command.stop_after_failures,
    )


def replay_of(options: Mapping[str, Any]) -> Any:
    """The recording that a run follows; nothing if it follows none."""
    collector = options.get("collector")
    return collector.get("replay") if isinstance(collector, Mapping) else None


def make_folder(folder: Path) -> None:
    """Make the directory of a run or a sweep; `ConfigError` if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written: it is read-only")


def plain(composed: DictConfig) -> dict[str, Any]:
    """The options of a composed config, less Hydra's own, with every reference resolved."""
    unresolved = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(unresolved, dict)
    unresolved.pop("hydra", None)
    options = OmegaConf.to_container(
        OmegaConf.create(unresolved), resolve=True, throw_on_missing=True
    )
    assert isinstance(options, dict)
    return {str(key): value for key, value in options.items()}


def to_config(options: Mapping[str, Any]) -> Config:
    """Plain options as dataclasses, typed and checked."""
    options = dict(options)
    build(RunConfig, {key: options[key] for key in hints(RunConfig) if key in options})
    load_plugins(options.get("plugins") or [])
    for registry in (algorithms, collectors, schemes, models):
        group = registry.group
        part_options = options.get(group)
        if not isinstance(part_options, Mapping):
            names = ", ".join(registry.names())
            raise ConfigError(f"{group}={part_options!r}: expected one of {names}")
        part = registry.get(part_options.get("name"))
        assert part.options is not None
        options[group] = build(part.options, part_options, group)
    for registry in (loggers, callbacks):
        options[registry.group] = dict(_several(registry, options.get(registry.group) or {}))
    config = build(Config, options)
    check(config)
    return config


def _several(registry: Registry, chosen: Any) -> Iterator[tuple[str, Any]]:
    """Each chosen part's options by its name."""
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"{registry.group}={chosen!r}: expected options by name")
    for name, options in chosen.items():
        part = registry.get(name)
        assert part.options is not None
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"{registry.group}.{name}={options!r}: expected a group of options")
        yield name, build(part.options, options or {}, f"{registry.group}.{name}")


# -- what is checked across parts


def check(config: Config) -> None:
    """Raise `ConfigError` for the first thing in the config that cannot work.

    Types and bounds were checked when the options were built. Each class of options checks its own
    combinations with the rest of the config: `check`.
    """
    check_environment(config.env)
    _check_evaluation(config)
    _check_devices(config)
    for part in config.parts():
        part.check(config)
    if getattr(config.collector, "replay", None) is not None:
        from harness.config.replay import check_replay

        check_replay(config)


def _check_evaluation(config: Config) -> None:
    evaluation, env = config.evaluation, config.env
    asked = evaluation.in_training
    if (
        (evaluation.at_end or asked)
        and env.vectorisation == "native"
        and find(env.id).entry_point is None
    ):
        raise ConfigError(
            f"env.id={env.id} exists only as a vector, but evaluation needs single environments; "
            + " ".join(["use evaluation.at_end=false", *(f"evaluation.{o}=null" for o in asked)])
        )


def _check_devices(config: Config) -> None:
    devices = config.collector.devices
    is_here = not config.collector.is_remote  # else only its host can tell
    policy = devices.policy if isinstance(devices.policy, list) else [devices.policy]
    _check_device("device", config.device)
    _check_device("collector.devices.storing", devices.storing)
    for device in policy:
        _check_device("collector.devices.policy", device, is_here=is_here)


def _check_device(place: str, device: str, *, is_here: bool = True) -> None:
    import torch  # here: naming no device but the CPU should not have to wait for CUDA

    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{place}={device}: no such device; try cpu, cuda or cuda:1") from None
    if parsed.type == "cpu":
        return
    if parsed.type != "cuda":
        raise ConfigError(f"{place}={device}: expected cpu or cuda")
    present = torch.cuda.device_count()
    if is_here and (parsed.index or 0) >= present:
        raise ConfigError(
            f"{place}={device}: this machine has {present} CUDA devices; "
            f"{'take cpu' if not present else f'cuda:{present - 1} is the last'}"
        )
