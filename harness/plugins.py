"""Plugins: modules of other packages that register algorithms, schemes, wrappers and so on.

Two ways lead here. A person names modules for one run, on the command line or in a config file of
their own (`plugins=[my_package.my_module]`); modules in the current directory are found, too. An
installed package declares them by the entry-point group `lockstep.plugins`.

Plugins are imported before the config is composed, since they add options to choose from, and again
in every worker. A run directory's stored plugins are imported only if a person names them again.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType

from harness.options.errors import ConfigError

GROUP = "lockstep.plugins"


def load_plugins(modules: Iterable[str]) -> None:
    """Import installed plugins, then these modules; `ConfigError` if one cannot be."""
    _load_installed()
    for module in modules:
        _load(module)


@cache
def _load_installed() -> None:
    for entry_point in entry_points(group=GROUP):
        try:
            entry_point.load()
        except Exception as error:
            raise ConfigError(
                f"the installed plugin {entry_point.value} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error


def import_named(module: str) -> ModuleType:
    """Import a module that a person has named, also one in the current directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last, so that it hides nothing
    return importlib.import_module(module)


def _load(module: str) -> None:
    if not isinstance(module, str):
        raise ConfigError(f"plugins holds {module!r}, expected the name of a module")
    try:
        import_named(module)
    except (Exception, SystemExit) as error:  # whatever that module does when it is imported
        raise ConfigError(
            f"plugins=[{module}] cannot be imported: {type(error).__name__}: {error}"
        ) from error
