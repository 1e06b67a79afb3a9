"""One run's overrides into a plan: the checked config, its plain form and where it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from harness.config.checks import check
from harness.config.compose import compose_job, parse
from harness.config.errors import ConfigError, suggest
from harness.config.remote import build_remote
from harness.config.schema import ALGOS, Config
from harness.config.typed import UnknownOption, build, paths
from harness.files import MOST_BYTES_YAML, DamagedError, parse_yaml, read_text, to_yaml
from harness.search import Trial

# Options of the command rather than of the run; they do not belong to what a run directory stores.
OF_THE_COMMAND = (
    *("resume", "skip_done", "skip_impossible", "sweep"),
    *("point", "stop_after_failures"),
)
# What a checkpoint holds the state of: a resumed run goes on with these as they were.
KEPT = (
    *("seed", "algo.name", "model.name"),
    *("collector.name", "collector.num_workers", "collector.remote.num_collectors"),
)


@dataclass
class RunPlan:
    """What one run will do, known to make sense before anything is started."""

    config: Config
    options: dict[str, Any]  # the same, plain, as stored in config.yaml
    directory: Path
    overrides: list[str]
    resume: bool = False
    skip_done: bool = False
    stop_after_failures: int | None = None  # of the sweep's jobs
    sweep: str | None = None
    trial: Trial | None = None  # of a search

    @property
    def yaml(self) -> str:
        """The options as config.yaml holds them."""
        return to_yaml(self.options)


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
        stop_after_failures=_limit("stop_after_failures", command["stop_after_failures"]),
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
        options["collector"] = build_remote(options.get("collector"))
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
    """The options that a run directory stores, as plain data: whoever wrote it is not trusted."""
    file = directory / "config.yaml"
    try:
        options = parse_yaml(read_text(file, MOST_BYTES_YAML))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{directory} is no run directory: it holds no config.yaml") from None
    except DamagedError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    if not isinstance(options, dict):
        raise ConfigError(f"{file} holds no options")
    return {str(key): value for key, value in options.items()}


def check_stored_env(options: Mapping[str, Any], directory: Path, *, say: str) -> None:
    """Raise if a stored config would have a package imported; `say` is how a person allows it."""
    env = options.get("env")
    env_id = env.get("id") if isinstance(env, Mapping) else None
    if isinstance(env_id, str) and ":" in env_id:
        module = env_id.rpartition(":")[0]
        raise ConfigError(
            f"env.id={env_id}, stored in {directory}, would import {module}, and its code would "
            f"run; if you trust it, say {say}"
        )


def _plan_resumed(directory: Path, overrides: Sequence[str]) -> RunPlan:
    """The stored config, with the options given beside `resume=` changed."""
    options = read_options(directory)
    given = set()
    for override in parse(overrides):
        key = override.key_or_group
        if key in OF_THE_COMMAND:
            continue
        given.add(key)
        if key == "sync.max_lag":
            raise ConfigError(
                f"{override.input_line}: algo.max_lag took its value when the run began, and is "
                "what counts; say algo.max_lag"
            )
        if key in KEPT and (began := _found(options, key.split("."))) != override.value():
            raise ConfigError(
                f"{override.input_line}: the run began with {key}={began} and goes on with it"
            )
        if override.is_delete() or not _change(options, key.split("."), _given(override)):
            raise ConfigError(
                f"{override.input_line}: a resumed run keeps its parts; single options may change"
            )
    if "env.id" not in given:
        env_id = options["env"].get("id") if isinstance(options.get("env"), dict) else ""
        check_stored_env(options, directory, say=f"env.id={env_id} on the command line, too")
    return RunPlan(
        config=to_config(options),
        options=options,
        directory=directory,
        overrides=list(overrides),
        resume=True,
    )


def _given(override: Override) -> Any:
    """What an override sets, which in a resumed run is no reference to other options."""
    value = override.value()
    if "${" in str(value):
        raise ConfigError(f"{override.input_line}: a resumed run's options are given as they are")
    return value


def _found(options: Any, path: list[str]) -> Any:
    """The option at a path; None if there is none."""
    for name in path:
        options = options.get(name) if isinstance(options, dict) else None
    return options


def _change(options: dict[str, Any], path: list[str], value: Any) -> bool:
    """Set one option in place; False if there is a group of options at its path, or none above."""
    *above, last = path
    for name in above:
        inner = options.setdefault(name, {})
        if not isinstance(inner, dict):
            return False
        options = inner
    if isinstance(options.get(last), dict):
        return False
    options[last] = value
    return True


def _limit(name: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{name}={value}: expected 1 or more, or null")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value}: expected true or false")
    return value
