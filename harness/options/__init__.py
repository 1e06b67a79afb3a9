"""Every option of a run, as dataclasses: its name, type, bounds, default and one line of comment.

`--help`, the reference page and the checks are generated from these classes. Loading them imports
neither torch nor gymnasium nor hydra, so that `--help` and completion are fast.
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
from harness.options.algorithms import (
    AlgorithmConfig,
    DQNConfig,
    GRPOConfig,
    IMPALAConfig,
    ObjectiveConfig,
    PPOConfig,
    SACConfig,
)
from harness.options.base import Options
from harness.options.collectors import CollectorConfig
from harness.options.loggers import LoggerConfig
from harness.options.models import (
    CNNConfig,
    CNNLSTMConfig,
    ImageConfig,
    ImpalaCNNConfig,
    ImpalaCNNLSTMConfig,
    LSTMConfig,
    MemoryConfig,
    MinAtarCNNConfig,
    MinAtarCNNLSTMConfig,
    MLPConfig,
    ModelConfig,
    TransformerConfig,
)
from harness.options.run import Config, EnvConfig
from harness.options.sync import SyncConfig
