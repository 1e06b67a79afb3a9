"""Composes a run's config: the steps before Hydra does it, and the same outside of the command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from harness.config.resumed import latest_run, resumed_config
from harness.config.sources import import_plugins
from harness.config.store import CONF, HYDRA_VERSION, store_options
from harness.files import DEEPEST
from harness.options.errors import ConfigError


def prepare(overrides: Sequence[str], **flags: Any) -> str:
    """Import plugins and store all options for Hydra; returns the name of the primary config.

    flags: the config directories and the primary config that a person names, which may name
    plugins.
    """
    _check_depth(overrides)
    import_plugins(overrides, **flags)
    store_options()
    return resumed_config(overrides) or "config"


def _check_depth(overrides: Sequence[str]) -> None:
    """Refuse deeply nested values, for which Hydra's parser needs gigabytes of memory."""
    for text in overrides:
        depth = 0
        for character in text:
            depth += (character in "[{(") - (character in ")}]")
            if depth > DEEPEST:
                raise ConfigError(f"{text[:40]}…: brackets are nested more than {DEEPEST} deep")


def compose_run(overrides: Sequence[str]) -> tuple[DictConfig, Any]:
    """The config of one run as the command would compose it, and the directory it would write."""
    config_name = prepare(overrides)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base=HYDRA_VERSION, job_name="lockstep"):
        composed = compose(config_name, list(overrides), return_hydra_config=True)
        return composed, composed.hydra.run.dir


def task_overrides(hydra_config: Any) -> list[str]:
    """The options on the command line, as typed."""
    found = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    assert isinstance(found, list)
    return [str(text) for text in found]


def quoted(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the path after `resume=` in quotes: job names contain an =.

    `resume=latest` gets the path of the newest run.
    """
    return [_quoted(text) for text in arguments]


def _quoted(text: str) -> str:
    key, _, path = text.partition("=")
    if key.lstrip("+") != "resume" or path[:1] in "'\"":
        return text
    return f"{key}='{latest_run() if path == 'latest' else path}'"
