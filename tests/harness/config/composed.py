"""Typed configs as the command makes them, where Hydra composes each choice of parts only once."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.compose import compose_run
from harness.config.explain import explained
from harness.config.plan import plain, plan_run, to_config
from harness.config.replay import follow_recording
from harness.errors import ConfigError
from harness.options.run import CommandConfig, Config

GROUPS = ("algo", "collector", "sync", "env", "model", "logger", "experiment")


def config_of(*overrides: str) -> Config:
    """The config of these overrides, checked; the errors of Hydra are not explained."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    choices = [str(one.input_line) for one in parsed if one.key_or_group in GROUPS]
    composed = deepcopy(_composed(*choices))
    for override in parsed:
        if override.input_line not in choices:
            OmegaConf.update(composed, override.key_or_group, override.value())
    command = CommandConfig.__dataclass_fields__
    options = {key: value for key, value in plain(composed).items() if key not in command}
    with explained(overrides):
        follow_recording(options, list(overrides))
        return to_config(options)


@cache
def _composed(*choices: str) -> DictConfig:
    return compose_run(choices)


def error_of(*overrides: str) -> str:
    """The one line with which these overrides are refused."""
    with pytest.raises(ConfigError) as refused:
        _check(overrides)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def _check(overrides: tuple[str, ...]) -> None:
    try:
        config_of(*overrides)
    except (HydraException, OmegaConfBaseException):
        plan_run(overrides)  # which explains what Hydra refuses
