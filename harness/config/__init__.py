"""The config of a run: from the command line to checked dataclasses, or one line of error."""

from harness.config.compose import CONF, compose_job, expand_sweep, groups
from harness.config.errors import ConfigError
from harness.config.load import RunPlan, plan_run
from harness.config.schema import Config

__all__ = [
    "CONF",
    "Config",
    "ConfigError",
    "RunPlan",
    "compose_job",
    "expand_sweep",
    "groups",
    "plan_run",
]
