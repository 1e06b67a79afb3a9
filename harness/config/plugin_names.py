"""The plugins that a command line names, directly or through the config files that it chooses.

Plugins add options to choose from, so they must be known before Hydra composes. Config files are
read here only for their `plugins:` and for the files that their defaults lists name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException

from harness.config.store import CONF
from harness.files import parse_yaml
from harness.options.errors import ConfigError
from harness.plugins import load_plugins


def import_plugins(
    overrides: Sequence[str],
    *,
    folders: Sequence[Path | None] = (),
    config_name: str | None = None,
) -> None:
    """Import what is named by `plugins=[...]`, on the command line or in a chosen config file.

    folders: config directories of the user's own, searched first.
    """
    load_plugins(dict.fromkeys(named_plugins(overrides, folders, config_name)))


def named_plugins(
    overrides: Sequence[str], folders: Sequence[Path | None], config_name: str | None
) -> Iterator[Any]:
    """The modules, in the order in which they are found."""
    given = dict(parsed(overrides))
    plugins = given.pop("plugins", None)
    if plugins is not None:
        yield from plugins if isinstance(plugins, list) else [plugins]
    searched = given.get("hydra.searchpath") or []
    searched = [str(place).removeprefix("file://") for place in searched if isinstance(place, str)]
    places = [Path(folder) for folder in (*folders, *searched, CONF) if folder]
    chosen = [config_name or "config"]
    for key, value in given.items():
        names = value if isinstance(value, list) else [value]
        chosen += [f"{key}/{name}" for name in names if isinstance(name, str)]
    seen: set[Path] = set()
    for name in chosen:
        yield from _plugins_of(name, places, seen)


def parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Key and value of each override that can be read; Hydra complains of the others."""
    for text in overrides:
        try:
            (override,) = OverridesParser.create().parse_overrides([text])
        except (HydraException, RecursionError, ValueError):
            continue
        if override.is_delete():
            continue
        if override.is_discrete_sweep() and override.value_type != ValueType.GLOB_CHOICE_SWEEP:
            values = [value.strip("'\"") for value in override.sweep_string_iterator()]
            yield override.key_or_group, values
        else:
            yield override.key_or_group, override.value()


def _plugins_of(name: str, folders: Sequence[Path], seen: set[Path]) -> Iterator[Any]:
    """The plugins of one config, `group/name`, and of those that its defaults list names."""
    file = next((f for folder in folders if (f := folder / f"{name}.yaml").is_file()), None)
    if file is None or file in seen:
        return
    seen.add(file)
    try:
        content = parse_yaml(file.read_text())
    except (OSError, ValueError):
        return  # Hydra says what is wrong with it
    if not isinstance(content, dict):
        return
    plugins = content.get("plugins") or []
    if not isinstance(plugins, list):
        raise ConfigError(f"{file}: plugins is {plugins!r}, expected a list of modules")
    yield from plugins
    group = name.rpartition("/")[0]
    for inner in _defaults(content.get("defaults"), group):
        yield from _plugins_of(inner, folders, seen)


def _defaults(entries: Any, group: str) -> Iterator[str]:
    """The configs that a defaults list names, as paths below a config directory."""
    for entry in entries if isinstance(entries, list) else []:
        pairs = list(entry.items()) if isinstance(entry, dict) else [("", entry)]
        for key, names in pairs:
            named = str(key).removeprefix("override ").removeprefix("optional ").partition("@")[0]
            for name in names if isinstance(names, list) else [names]:
                if isinstance(name, str) and name != "_self_":
                    path = f"{named}/{name}" if named else name
                    absolute = path.startswith("/") or not group
                    yield path.lstrip("/") if absolute else f"{group}/{path}"
