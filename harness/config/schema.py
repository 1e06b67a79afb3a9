"""The options of a run, as dataclasses. The files in conf/ hold the same names, with comments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from harness.algorithms.ppo import PPOConfig
from harness.algorithms.sac import SACConfig
from harness.config.hosts import JoiningConfig, RayConfig
from harness.config.link import LinkConfig
from harness.environments.factory import EnvConfig
from harness.models.encoders import ModelConfig


@dataclass
class DevicesConfig:
    """Where workers compute actions (one device, or one for each), and where batches are put."""

    policy: str | list[str] = "cpu"
    storing: str = "cpu"


@dataclass
class CollectorConfig:
    """Who steps the environments, and how many frames make a batch."""

    name: Literal["single", "multi_sync", "multi_async", "distributed", "rpc", "ray"]
    num_workers: int = 1
    frames_per_batch: int = 512
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    max_frames_per_traj: int | None = None
    exploration: Literal["random", "mode", "mean", "deterministic"] = "random"
    reset_at_each_iter: bool = False
    next_observation: Literal["all", "final"] = "all"
    resume_episodes: bool = True
    preemptive_threshold: float | None = None
    batches_ahead: int = 2
    free_running: bool = False
    compile_policy: bool = False
    cudagraph_policy: bool = False
    num_threads: int = 1
    on_worker_failure: Literal["raise", "restart"] = "raise"
    max_restarts: int = 3
    timeout_s: float = 60.0
    remote: JoiningConfig | RayConfig | None = None


@dataclass
class SyncConfig:
    """How the weights get to the workers, and when."""

    name: Literal["shared_mem", "multiprocess", "hogwild", "none", "distributed", "rpc", "ray"]
    blocking: bool = False
    interval: int = 1
    apply_at: Literal["step", "batch", "episode"] = "step"
    state_on_update: Literal["keep", "zero"] = "keep"
    max_lag: int | None = None
    on_stale: Literal["drop", "wait"] = "drop"
    strategy: Literal["tensordict", "state_dict"] = "tensordict"
    check_finite: bool | Literal["all"] = True
    zero_copy: bool = False
    check_torn: bool = False
    timeout_s: float = 10.0
    connect_timeout_s: float = 60.0
    wire: Literal["float32", "bfloat16", "float16", "int8", "delta"] = "float32"
    link: LinkConfig = field(default_factory=LinkConfig)


@dataclass
class LoggerConfig:
    """What receives the metrics besides metrics.jsonl, which always does."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "lockstep"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    tensorboard: bool = False


@dataclass
class EvaluationConfig:
    """Episodes of the deterministic policy, in environments and with seeds of their own."""

    every_frames: int | None = None
    num_episodes: int = 10
    max_steps: int = 100_000
    at_end: bool = True


@dataclass
class CheckpointConfig:
    """When to write what a resumed run needs, and how many to keep."""

    every_frames: int | None = None
    at_end: bool = True
    keep: int = 3


@dataclass
class Config:
    """One run."""

    algo: PPOConfig | SACConfig
    collector: CollectorConfig
    sync: SyncConfig
    env: EnvConfig
    model: ModelConfig
    logger: LoggerConfig
    name: str
    total_frames: int
    seed: int = 1
    device: str = "cpu"
    num_threads: int = 1
    log_every_frames: int = 1
    print_every_s: float = 5.0
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


ALGOS: dict[str, type] = {"ppo": PPOConfig, "sac": SACConfig}
