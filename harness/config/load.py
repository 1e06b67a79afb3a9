"""One run's overrides into a plan: the checked config, its plain form and where it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.checks import check
from harness.config.compose import compose_job, parse
from harness.config.errors import ConfigError, suggest
from harness.config.schema import ALGOS, Config
from harness.config.typed import UnknownOption, build, paths

# Options of the command rather than of the run; they do not belong to what a run directory stores.
OF_THE_COMMAND = ("resume", "skip_done", "sweep")


@dataclass
class RunPlan:
    """What one run will do, known to make sense before anything is started."""

    config: Config
    options: dict[str, Any]  # the same, plain, as stored in config.yaml
    directory: Path
    overrides: list[str]
    resume: bool = False
    skip_done: bool = False
    sweep: str | None = None

    @property
    def yaml(self) -> str:
        """The options as config.yaml holds them."""
        return OmegaConf.to_yaml(OmegaConf.create(self.options))


def plan_run(overrides: Sequence[str]) -> RunPlan:
    """The plan of one run; `ConfigError` if it cannot be."""
    return plan_from_options(*compose_job(overrides), list(overrides))


def plan_from_options(options: dict[str, Any], directory: Path, overrides: list[str]) -> RunPlan:
    """The plan of one run, composed already."""
    command = {key: options.pop(key, None) for key in OF_THE_COMMAND}
    if command["resume"] is not None:
        return _plan_resumed(Path(str(command["resume"])), overrides)
    return RunPlan(
        config=to_config(options),
        options=options,
        directory=directory,
        overrides=overrides,
        skip_done=_flag("skip_done", command["skip_done"]),
    )


def to_config(options: Mapping[str, Any]) -> Config:
    """Typed and checked."""
    options = dict(options)
    algo = options.get("algo")
    if not isinstance(algo, Mapping):
        raise ConfigError(f"algo={algo!r}: expected one of {', '.join(ALGOS)}")
    name = str(algo.get("name"))
    if name not in ALGOS:
        raise ConfigError(f"algo.name={name}: no such algorithm; {suggest(name, ALGOS)}")
    try:
        options["algo"] = build(ALGOS[name], algo, "algo")
        config = build(Config, options)
    except UnknownOption as error:
        raise ConfigError(error.explain(_hint(error, ALGOS[name]))) from None
    check(config)
    return config


def _hint(error: UnknownOption, algo: type) -> str:
    """Where an option of that very name is; else what is near it in its own group."""
    everywhere = {**paths(Config), **{f"algo.{p}": leaf for p, leaf in paths(algo).items()}}
    elsewhere = [path for path, leaf in everywhere.items() if leaf == error.key]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return suggest(error.key, error.known, prefix=f"{error.path}." if error.path else "")


def read_options(directory: Path) -> dict[str, Any]:
    """The options that a run directory stores."""
    file = directory / "config.yaml"
    try:
        options = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{directory} is no run directory: it holds no config.yaml") from None
    except (OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"{file} holds no options")
    return {str(key): value for key, value in options.items()}


def _plan_resumed(directory: Path, overrides: Sequence[str]) -> RunPlan:
    """The stored config, with the options given beside `resume=` changed."""
    stored = OmegaConf.create(read_options(directory))
    for override in parse(overrides):
        key = override.key_or_group
        if key in OF_THE_COMMAND:
            continue
        if override.is_delete() or OmegaConf.is_dict(OmegaConf.select(stored, key)):
            raise ConfigError(
                f"{override.input_line}: a resumed run keeps its parts; single options may change"
            )
        OmegaConf.update(stored, key, override.value(), force_add=True)
    options = OmegaConf.to_container(stored, resolve=True)
    assert isinstance(options, dict)
    plain = {str(key): value for key, value in options.items()}
    return RunPlan(
        config=to_config(plain),
        options=plain,
        directory=directory,
        overrides=list(overrides),
        resume=True,
    )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value}: expected true or false")
    return value
