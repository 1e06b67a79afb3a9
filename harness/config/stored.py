"""The config that a run directory stores, as plain data, with single options changed.

`resume=RUN`, `reproduce` and `play` use it. Run directories are not trusted: nothing in the file is
interpreted, and the user must name again everything that would import a package.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.config.compose import parsed
from harness.errors import ConfigError
from harness.files import MOST_BYTES_YAML, DamagedError, parse_yaml, read_text
from harness.options.base import GONE
from harness.options.run import CommandConfig

# What a checkpoint holds the state of: a resumed run goes on with these as they were.
KEPT = (
    "seed",
    "algo.name",
    "model.name",
    "collector.name",
    "collector.num_workers",
)


def resumed_options(
    directory: Path, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a resumed run, and those of the command.

    `ConfigError` if an override changes what the run's checkpoint holds, or is not a single option.
    """
    stored = read_options(directory)
    typed = {text.partition("=")[0].lstrip("+"): text for text in overrides}
    values = dict(parsed(overrides))
    for name, text in typed.items():
        if name not in values:
            raise ConfigError(f"{text!r}: to resume a run, write option=value for each change")
    _check_named_again(directory, stored, typed)
    command = {
        name: values.pop(name) for name in CommandConfig.__dataclass_fields__ if name in values
    }
    options = stored
    for name, value in values.items():
        options = changed(options, name, _resolved(value), typed[name])
    if "sync.max_lag" in typed:
        raise ConfigError(
            f"{typed['sync.max_lag']}: the run was started with algo.max_lag, which has priority; "
            "set algo.max_lag"
        )
    for name in KEPT:
        before = option(stored, name)
        if name in typed and option(options, name) != before:
            raise ConfigError(f"{typed[name]}: a resumed run keeps {name}={before}")
    return options, command


def changed(options: Mapping[str, Any], name: str, value: Any, typed: str) -> dict[str, Any]:
    """Options with one of them changed, by its dotted name.

    Whether there is such an option is checked with all the others. typed: what a person has typed.
    """
    first, _, rest = name.partition(".")
    inner = options.get(first)
    if rest:
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{typed}: the stored config has no group {first}")
        return {**options, first: changed(inner, rest, value, typed)}
    if isinstance(inner, Mapping) and not isinstance(value, Mapping):
        raise ConfigError(
            f"{typed}: a stored run keeps its parts; single options may change, {first}.x=..."
        )
    return {**options, first: value}


def _resolved(value: Any) -> Any:
    """A value from the command line, with what it refers to: `${oc.env:X}`."""
    return OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=True)["value"]  # type: ignore[call-overload, index]


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
    options = {str(key): one for key, one in options.items() if key not in ("defaults", "hydra")}
    for name in GONE:
        _drop_unset(options, name)
    return options


def _drop_unset(options: dict[str, Any], name: str) -> None:
    """Remove an option that is gone where it was null; another value is refused with the rest."""
    *groups, key = name.split(".")
    for group in groups:
        inner = options.get(group)
        if not isinstance(inner, dict):
            return
        options = inner
    if key in options and options[key] is None:
        del options[key]


def trusted_options(
    directory: Path, *, import_env: bool = False, plugins: Sequence[str] = ()
) -> dict[str, Any]:
    """The options that a run directory stores, if a person has named all that they would import."""
    options = read_options(directory)
    check_stored_imports(options, directory, import_env=import_env, plugins=plugins)
    return options


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
    flag: str = "--import-env",
    plugin_flag: str = "--plugin",
) -> None:
    """Raise if a stored config would have a package imported that no person has named.

    import_env: what env.id and env.wrappers name may be imported. plugins: these may be, too.
    flag, plugin_flag: how a person allows it.
    """
    for option, module, name in _imports(options):
        is_plugin = option == "plugins"
        if module in plugins if is_plugin else import_env:
            continue
        allow = f"{plugin_flag} {module}" if is_plugin else flag.format(option=option, name=name)
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


def _check_named_again(
    directory: Path, stored: Mapping[str, Any], typed: Mapping[str, str]
) -> None:
    """Raise unless the command line names what the stored config would import."""
    remaining = {name: value for name, value in stored.items() if name not in typed}
    env = stored.get("env")
    if isinstance(env, Mapping):
        remaining["env"] = {name: env[name] for name in env if f"env.{name}" not in typed}
    again = "{option}={name} on the command line, too"
    check_stored_imports(remaining, directory, flag=again, plugin_flag="plugins=[...] with")


def option(options: Any, name: str) -> Any:
    """The option of a dotted name; None if there is none."""
    for key in name.split("."):
        options = options.get(key) if isinstance(options, Mapping) else None
    return options
