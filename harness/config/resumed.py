"""`resume=RUN`: the config that a run directory stores, with single options changed.

The stored config replaces conf/config.yaml, and Hydra applies the command line to it. Run
directories are not trusted: the file is read as plain data, and the user must name again everything
that would import a package.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from harness.files import MOST_BYTES_YAML, DamagedError, parse_yaml, read_text
from harness.options.base import defaults
from harness.options.errors import ConfigError
from harness.options.run import CommandConfig

NAME = "lockstep_resumed"
# What a checkpoint holds the state of: a resumed run goes on with these as they were.
KEPT = (
    *("seed", "algo.name", "model.name"),
    *("collector.name", "collector.num_workers", "collector.remote.num_collectors"),
)
CHECK_FIRST = "harness.config.application.CheckFirst"  # as in conf/config.yaml
QUIET = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]


def resumed_config(overrides: Sequence[str]) -> str | None:
    """The name of the primary config that the run to be resumed stores; None if none is."""
    directory = resumed_run(overrides)
    if directory is None:
        return None
    options = read_options(directory)
    check_named_again(directory, options, overrides)
    command = defaults(CommandConfig) | {"sweep": "resumed"}
    hydra = {
        "run": {"dir": _literal(str(directory))},
        "output_subdir": None,
        "job": {"name": "lockstep"},
        "callbacks": {"check_first": {"_target_": CHECK_FIRST}},
    }
    stored = _literal(options)
    node = {"defaults": [*QUIET, "_self_"], **stored, **command, "hydra": hydra}
    ConfigStore.instance().store(name=NAME, node=node, provider="lockstep")
    return NAME


def resumed_run(overrides: Sequence[str]) -> Path | None:
    """The directory of the run that the command line resumes; None if it resumes none."""
    pairs = [text.partition("=") for text in overrides]
    given = [path.strip("'\"") for key, _, path in pairs if key.lstrip("+") == "resume"]
    return Path(given[-1]) if given and given[-1] not in ("null", "") else None


def latest_run() -> Path:
    """The run below outputs/ whose state changed last; `ConfigError` if there is none."""
    states = [
        file
        for file in Path("outputs").rglob("status.json")
        if not any(part.startswith(".") for part in file.parts)  # moved aside
    ]
    if not states:
        raise ConfigError("resume=latest: there is no run below outputs/")
    return max(states, key=lambda file: file.stat().st_mtime_ns).parent


def read_options(directory: Path) -> dict[str, Any]:
    """The options that a run directory stores, as plain data: whoever wrote it is not trusted."""
    file = directory / "config.yaml"
    try:
        options = parse_yaml(read_text(file, MOST_BYTES_YAML))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{directory} is not a run directory: it has no config.yaml") from None
    except DamagedError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    if not isinstance(options, dict):
        raise ConfigError(f"{file} holds no options")
    return {str(key): value for key, value in options.items() if key not in ("defaults", "hydra")}


def _literal(value: Any) -> Any:
    """Plain data in which Hydra finds no reference to other options or to the environment."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", value)
    if isinstance(value, Mapping):
        return {key: _literal(inner) for key, inner in value.items()}
    return [_literal(inner) for inner in value] if isinstance(value, list) else value


def add_import_flags(parser: argparse.ArgumentParser) -> None:
    """The flags with which a person names again what `check_stored_imports` asks for."""
    parser.add_argument(
        "--import-env",
        action="store_true",
        help="import what the run's env.id and env.wrappers name; its code is executed",
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a plugin that the run used; its code is executed (may be repeated)",
    )


def check_stored_imports(
    options: Mapping[str, Any],
    directory: Path,
    *,
    import_env: bool = False,
    plugins: Sequence[str] = (),
    say: str = "--import-env",
    say_plugins: str = "--plugin",
) -> None:
    """Raise if a stored config would have a package imported that no person has named.

    import_env: what env.id and env.wrappers name may be imported. plugins: these may be, too.
    say, say_plugins: how a person allows it.
    """
    for option, module, name in _imports(options):
        is_plugin = option == "plugins"
        if module in plugins if is_plugin else import_env:
            continue
        allow = f"{say_plugins} {module}" if is_plugin else say.format(option=option, name=name)
        raise ConfigError(
            f"{option}={name}, stored in {directory}, would import {module} and execute its code; "
            f"if you trust it, use {allow}"
        )


def _imports(options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What a stored config would import: the option that names it, the module, and the value."""
    env = options.get("env")
    env = env if isinstance(env, Mapping) else {}
    env_id, wrappers, plugins = env.get("id"), env.get("wrappers"), options.get("plugins")
    if isinstance(env_id, str) and ":" in env_id:
        yield "env.id", env_id.rpartition(":")[0], env_id
    for entry in wrappers if isinstance(wrappers, list) else []:
        for name in entry if isinstance(entry, Mapping) else [entry]:
            if isinstance(name, str) and ":" in name:
                yield "env.wrappers", name.partition(":")[0], name
    for module in plugins if isinstance(plugins, list) else []:
        yield "plugins", str(module), str(module)


def check_resumed(directory: Path, options: dict[str, Any], overrides: Sequence[str]) -> None:
    """Raise if the options given for a resumed run change what its checkpoint holds."""
    stored = read_options(directory)
    given = {text.partition("=")[0].lstrip("+"): text for text in overrides}
    if "sync.max_lag" in given:
        raise ConfigError(
            f"{given['sync.max_lag']}: the run was started with algo.max_lag, which has priority; "
            "set algo.max_lag"
        )
    for key in KEPT:
        began = _found(stored, key.split("."))
        if key in given and _found(options, key.split(".")) != began:
            raise ConfigError(f"{given[key]}: a resumed run keeps {key}={began}")


def check_named_again(directory: Path, stored: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise unless the command line names what the stored config would import."""
    given = {text.partition("=")[0].lstrip("+") for text in overrides}
    remaining = {key: value for key, value in stored.items() if f"{key}" not in given}
    env = stored.get("env")
    if isinstance(env, Mapping):
        remaining["env"] = {key: env[key] for key in env if f"env.{key}" not in given}
    again = "{option}={name} on the command line, too"
    check_stored_imports(remaining, directory, say=again, say_plugins="plugins=[...] with")


def _found(options: Any, path: list[str]) -> Any:
    """The option at a path; None if there is none."""
    for name in path:
        options = options.get(name) if isinstance(options, Mapping) else None
    return options
