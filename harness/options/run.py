"""Options of the whole run, its environment and the command; what a part's options derive from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from collectors.options.check_types import Count, NonNegativeInt, Range, Seconds
from harness.errors import ConfigError, show
from harness.options.base import Options
from harness.options.collectors import CollectorConfig
from harness.options.sync import SyncConfig

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]


@dataclass
class AlgorithmConfig(Options):
    """Options that every algorithm has."""

    group: ClassVar[str] = "algo"
    replays: ClassVar[bool] = False  # whether it learns from samples of a replay buffer

    name: str = ""  # the registered name

    @property
    def random_frames(self) -> int:
        """How many frames to collect with random actions before the policy acts."""
        return 0

    @property
    def sampled_frames(self) -> int:
        """How many observations the algorithm gets before version 0 is published."""
        return 0

    def check(self, config: Any) -> None:
        if not self.replays and config.collector.fills_replay_buffer:
            raise ConfigError(
                f"collector.free_running=true algo={self.name}: it has no replay buffer to fill; "
                "use algo=sac or algo=dqn"
            )


@dataclass
class ModelConfig(Options):
    """Options that every model has."""

    group: ClassVar[str] = "model"
    recurrent: ClassVar[bool] = False  # whether it carries a state from step to step
    own_critic: ClassVar[bool] = False  # whether a critic has an encoder of its own

    name: str = ""  # the registered name
    hidden_sizes: list[Count] = field(default_factory=lambda: [64, 64])  # widths, input to output
    activation: Activation = "tanh"  # after each hidden layer


@dataclass
class LoggerConfig(Options):
    """Options that every logger has: none."""

    group: ClassVar[str] = "logger"


@dataclass
class EnvConfig(Options):
    """Any environment that is registered with gymnasium, selected by env.id."""

    group: ClassVar[str] = "env"

    id: str = "CartPole-v1"  # a gymnasium id; module:Name-v0 imports the module first
    num_envs: Annotated[int, Range(1, 1_000_000)] = 8  # that each worker steps with one policy call
    # none (one environment), sync (in turn), async (a process each), native (the environment's own)
    # or envpool (EnvPool's environments of the same ids, in C++)
    vectorisation: Literal["none", "sync", "async", "native", "envpool"] = "sync"
    # innermost first, in evaluation too: a registered name, {name: {arguments}}, or module:Class
    wrappers: list[Any] = field(default_factory=list)
    max_episode_steps: Count | None = None  # null: the environment's own limit
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the environment itself

    def check(self, config: Any) -> None:
        if self.vectorisation == "none" and self.num_envs != 1:
            raise ConfigError(
                f"env.num_envs={self.num_envs} env.vectorisation=none: expected 1; "
                "env.vectorisation=sync steps several"
            )


@dataclass
class EvaluationConfig(Options):
    """Episodes of the newest weights, in separate environments with their own seeds."""

    every_frames: Count | None = None  # evaluate this often; null: not by frames
    every_updates: Count | None = None  # evaluate this often; null: not by updates
    times: Count | None = None  # this many evaluations at equal gaps of frames, the last at the end
    num_episodes: Count = 10  # of one evaluation, greedy, and as many again with sampled actions
    max_steps: Count = 100_000  # end an evaluation episode after this many steps
    at_end: bool = True  # evaluate after training

    @property
    def in_training(self) -> dict[str, int]:
        """What asks for evaluations during training: option and value."""
        names = ("every_frames", "every_updates", "times")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass
class CheckpointConfig(Options):
    """When to write checkpoints, and how many to keep."""

    every_frames: Count | None = None  # write one this often; null: not during training
    at_end: bool = True  # write one at the end, also when interrupted
    keep: Count = 3  # how many of the newest to keep


@dataclass
class RunConfig:
    """Options that belong to no group and are stored in the run directory."""

    name: str = "${algo.name}-${env.id}"  # the last part of the run directory's name
    total_frames: Count = 300_000  # stop after this many environment steps
    seed: NonNegativeInt = 1  # seed of all randomness
    device: str = "cpu"  # where the learner computes: cpu, cuda, cuda:1, ...
    num_threads: Annotated[int, Range(1, 4096)] = 1  # torch threads of the learner
    # write a record every so many frames, at evaluations and at the end
    log_every_frames: Count = 1
    print_every_s: Seconds = 5.0  # without a terminal: print a line this often
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    plugins: list[str] = field(default_factory=list)  # modules to import that register parts


@dataclass
class CommandConfig:
    """Options of the command, which are not stored."""

    # a run directory: continue from its newest checkpoint; latest: the newest run below outputs/
    resume: str | None = None
    # skip jobs whose directory holds a finished run of the same config, and let interrupted runs of
    # it go on from their newest checkpoint
    skip_done: bool = False
    # move a finished run that is in the way to .earlier/; false: refuse to start
    replace_done: bool = False
    skip_impossible: bool = False  # skip jobs whose options do not work together
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

    @property
    def cause_of_lag(self) -> str | None:
        """The option because of which frames lag behind the learner; None if none does."""
        if lag := getattr(self.sync, "lag", 0):
            return f"sync.lag={show(lag)}"
        if self.collector.asynchronous:
            return f"collector={self.collector.name}"
        return f"sync.interval={self.sync.interval}" if self.sync.interval > 1 else None
