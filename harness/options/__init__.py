"""What the options of a part derive from, and the types and bounds of their fields.

The options of an algorithm, a model or a logger stand in its own file. Those of collectors and
schemes are here, since `collectors` and `sync` know nothing of a config. Loading these imports
neither torch nor gymnasium nor hydra, so that `--help` is fast.
"""

from collectors.options.check_types import (
    Count,
    NonNegative,
    NonNegativeInt,
    Positive,
    Range,
    Seconds,
    Share,
)
from harness.errors import ConfigError, ImpossiblePair
from harness.options.base import Options
from harness.options.collectors import CollectorConfig
from harness.options.run import AlgorithmConfig, Config, EnvConfig, LoggerConfig, ModelConfig
from harness.options.sync import SyncConfig
