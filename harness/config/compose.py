"""Composes configs: what is done before Hydra does it, and one run by Hydra's compose API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from harness.config.plugin_names import import_plugins
from harness.config.store import CONF, HYDRA_VERSION, SearchPath, store_options
from harness.config.stored import latest_run
from harness.files import DEEPEST
from harness.options.errors import ConfigError

PATHS = ("resume", "collector.replay")  # options that name a run's directory


@dataclass(frozen=True)
class Place:
    """Where configs are found."""

    conf: Path = CONF  # the directory of the primary config
    name: str = "config"  # of the primary config
    user_directory: Path | None = None  # searched before `conf`

    def import_plugins(self, overrides: Sequence[str]) -> None:
        """Import the plugins that overrides name, or the config files that they choose."""
        _check_depth(overrides)
        if self.user_directory is not None and not self.user_directory.is_dir():
            raise ConfigError(f"--config-dir {self.user_directory}: there is no such directory")
        import_plugins(overrides, folders=[self.user_directory, self.conf], config_name=self.name)

    def prepare(self, overrides: Sequence[str]) -> None:
        """Import plugins, and tell Hydra of all options and of the user's directory."""
        self.import_plugins(overrides)
        SearchPath.user_directory = self.user_directory
        store_options()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Where Hydra composes from."""
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(self.conf), version_base=HYDRA_VERSION, job_name="lockstep"):
            yield

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The config of one run, with Hydra's own part."""
        with self.opened():
            return compose(self.name, list(overrides), return_hydra_config=True)


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """The config of one run as the command would compose it."""
    place = Place()
    place.prepare(overrides)
    return place.compose(overrides)


def _check_depth(overrides: Sequence[str]) -> None:
    """Refuse deeply nested values, for which Hydra's parser needs gigabytes of memory."""
    for text in overrides:
        depth = 0
        for character in text:
            depth += (character in "[{(") - (character in ")}]")
            if depth > DEEPEST:
                raise ConfigError(f"{text[:40]}…: brackets are nested more than {DEEPEST} deep")


def task_overrides(hydra_config: Any) -> list[str]:
    """The options on the command line, as typed."""
    overrides = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return [str(text) for text in overrides]


def quoted(arguments: Sequence[str], *, sweeps: bool = False) -> list[str]:
    """The arguments, with paths of runs in quotes, where Hydra would not read them as one text.

    Job names contain an =. `resume=latest` gets the path of the newest run. sweeps: whether commas
    are between values.
    """
    return [_quoted(text, sweeps=sweeps) for text in arguments]


def _quoted(text: str, *, sweeps: bool) -> str:
    key, _, path = text.partition("=")
    name = key.lstrip("+")
    if name == "resume" and path == "latest":
        path = str(latest_run())
    elif name not in PATHS or _is_read_as_meant(text, sweeps=sweeps):
        return text
    paths = path.split(",") if sweeps else [path]
    return f"{key}={','.join(map(_in_quotes, paths))}"


def _is_read_as_meant(text: str, *, sweeps: bool) -> bool:
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException:
        return False
    return sweeps or not override.is_sweep_override()


def _in_quotes(path: str) -> str:
    """A text as Hydra's grammar quotes it: of backslashes before a quote, each is doubled."""
    escaped = re.sub(r"(\\*)('|$)", lambda end: 2 * end[1] + ("\\'" if end[2] else ""), path)
    return f"'{escaped}'"
