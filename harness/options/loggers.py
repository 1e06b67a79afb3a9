"""`logger=`: options of loggers, in addition to metrics.jsonl. Several: logger=[a,b]."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from collectors.options.check_types import Positive
from harness.errors import ConfigError, require
from harness.options.base import Options


@dataclass
class LoggerConfig(Options):
    """Options that every logger has: none."""

    group: ClassVar[str] = "logger"


@dataclass
class JsonlConfig(LoggerConfig):
    """Only metrics.jsonl, which every run writes."""


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases, offline unless told otherwise."""

    mode: Literal["offline", "online", "disabled"] = "offline"  # offline runs can be synced later
    project: str = "lockstep"  # the project of the run
    entity: str | None = None  # the account or team; null: your own
    tags: list[str] = field(default_factory=list)  # of the run
    # files of the run to keep there: manifest (with the code's commit and changes), checkpoint
    artifacts: list[Literal["manifest", "checkpoint"]] = field(default_factory=list)
    system_metrics: bool = False  # W&B's own, beside system/* in every record


@dataclass
class TraceConfig(LoggerConfig):
    """A timeline of learner and workers in trace.json, for Perfetto or chrome://tracing."""

    max_mb: Positive = 64.0  # the largest size; later events are dropped


@dataclass
class TensorBoardConfig(LoggerConfig):
    """Event files for TensorBoard, in the run directory's tensorboard/."""

    def check(self, config: Any) -> None:
        require("logger=tensorboard", "tensorboard", "tensorboard")


@dataclass
class EventsConfig(Options):
    """The events of all samples in events.jsonl, for `lockstep check`."""

    group: ClassVar[str] = "callbacks"
    checksums: bool = True  # of each published version, to compare two runs

    def check(self, config: Any) -> None:
        if config.algo.replays:
            raise ConfigError(
                "callbacks=[events] follows samples to the update that trains on them, and this "
                "algorithm draws from a replay buffer: use algo=ppo, impala or grpo"
            )
