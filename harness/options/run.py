"""The options of a run as a whole, and of the command that starts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from harness.options.algorithms import AlgorithmConfig
from harness.options.base import Options
from harness.options.collectors import CollectorConfig
from harness.options.environments import EnvConfig
from harness.options.models import ModelConfig
from harness.options.sync import SyncConfig
from harness.options.typed import Count, NonNegativeInt, Range, Seconds


@dataclass
class EvaluationConfig(Options):
    """Episodes of the deterministic policy, in environments and with seeds of their own."""

    every_frames: Count | None = None  # evaluate this often; null: not during training
    num_episodes: Count = 10  # each time
    max_steps: Count = 100_000  # cut an episode that has not ended by then
    at_end: bool = True  # and once after training


@dataclass
class CheckpointConfig(Options):
    """When to write what a resumed run needs, and how many to keep."""

    every_frames: Count | None = None  # write one this often; null: not during training
    at_end: bool = True  # and at the end, also when interrupted
    keep: Count = 3  # how many of the newest to keep


@dataclass
class RunConfig:
    """What belongs to no group, and is stored in the run directory."""

    name: str = "${algo.name}-${env.id}"  # ends the name of the run directory
    total_frames: Count = 300_000  # stop after this many environment steps
    seed: NonNegativeInt = 1  # of everything random
    device: str = "cpu"  # where the learner computes: cpu, cuda, cuda:1, ...
    num_threads: Annotated[int, Range(1, 4096)] = 1  # torch threads of the learner
    # a record at the first batch after this many frames, at evaluations and at the end
    log_every_frames: Count = 1
    print_every_s: Seconds = 5.0  # a line this often where there is no terminal
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    plugins: list[str] = field(default_factory=list)  # modules to import, which register parts


@dataclass
class CommandConfig:
    """What is asked of the command, and is not stored."""

    resume: str | None = None  # a run directory: continue from its newest checkpoint
    skip_done: bool = False  # leave out a job whose directory holds a finished run of its config
    skip_impossible: bool = False  # leave out pairs of scheme and collector that cannot work
    # start no further job of a sweep after this many have failed; null: never
    stop_after_failures: Count | None = None
    # index into values that vary together, ${zip:1e-3,3e-4}: --multirun point=0,1
    point: NonNegativeInt = 0
    sweep: str = "${now:%Y-%m-%d}/${now:%H-%M-%S}-sweep"  # --multirun: outputs/<sweep>/<job>


@dataclass(kw_only=True)
class Config(RunConfig):
    """One run."""

    algo: AlgorithmConfig
    collector: CollectorConfig
    sync: SyncConfig
    env: EnvConfig
    model: ModelConfig
    logger: dict[str, Any] = field(default_factory=dict)  # options by name
    callbacks: dict[str, Any] = field(default_factory=dict)  # options by name

    def parts(self) -> Iterator[Options]:
        """The options of every part, in the order in which they are checked."""
        yield from (self.algo, self.env, self.model, self.collector, self.sync)
        yield from (*self.logger.values(), *self.callbacks.values())
