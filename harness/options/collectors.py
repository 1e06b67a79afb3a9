"""`collector=`: options of collectors: who steps the environments, and the size of batches."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from collectors.options.check_types import (
    Count,
    NonNegative,
    NonNegativeInt,
    Port,
    PositiveShare,
    Range,
    Seconds,
)
from harness.errors import ConfigError, require
from harness.options.base import Options, linked

Threads = Annotated[int, Range(1, 4096)]
Workers = Annotated[int, Range(1, 4096)]


@dataclass
class DevicesConfig(Options):
    """Where workers compute, and where their batches are stored."""

    group: ClassVar[str] = "collector.devices"

    policy: str | list[str] = "cpu"  # where actions are computed; one per worker: [cuda:0,cuda:1]
    storing: str = "cpu"  # where batches are stored


@dataclass
class CollectorConfig(Options):
    """Options that every collector has. The properties below say what kind of collector it is."""

    group: ClassVar[str] = "collector"
    scheme: ClassVar[str | None] = None  # the only sync scheme that it goes with
    simulates: ClassVar[bool] = False  # whether its workers are virtual, so that no weights travel

    name: str = ""  # the registered name
    frames_per_batch: Count = 1024  # frames of one batch
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    max_frames_per_traj: Count | None = None  # truncate longer episodes
    # how actions are taken
    exploration: Literal["random", "mode", "mean", "deterministic"] = "random"
    reset_at_each_iter: bool = False  # start every batch with new episodes
    # final: store next observations only at ends, which halves the memory (algo=ppo)
    next_observation: Literal["all", "final"] = "all"
    resume_episodes: bool = True  # a resumed run replays its unfinished episodes; false: new ones
    compile_policy: bool = False  # torch.compile in the workers
    cudagraph_policy: bool = False  # replay the policy as one CUDA graph
    timeout_s: Seconds = 60.0  # a silent worker is an error after this long

    @property
    def workers(self) -> int:
        """How many workers there are in all."""
        return 1

    @property
    def place(self) -> str:
        """Where the workers are, for the line at a run's start."""
        return "in this process"

    @property
    def is_remote(self) -> bool:
        """Whether workers may be on other machines."""
        return False

    @property
    def workers_of_a_batch(self) -> int:
        """How many workers make each batch together."""
        return 1

    @property
    def asynchronous(self) -> bool:
        """Whether workers collect at their own pace, and each batch is from one of them."""
        return False

    @property
    def fills_replay_buffer(self) -> bool:
        """Whether it fills the replay buffer in the background while the learner trains."""
        return False

    @property
    def overwrites(self) -> bool:
        """Whether it may overwrite frames in the replay buffer that the learner has not seen."""
        return False

    @property
    def preempts(self) -> bool:
        """Whether a batch may omit frames that slow workers have not finished."""
        return False

    @property
    def records_schedule(self) -> bool:
        """Whether it records its schedule, which can then be replayed."""
        return self.asynchronous and not self.fills_replay_buffer and not self.simulates

    def arguments(self, config: Any) -> dict[str, Any]:
        """The constructor's arguments, besides environments, policy and scheme."""
        return {
            "frames_per_batch": self.frames_per_batch,
            "policy_device": self.devices.policy,
            "storing_device": self.devices.storing,
            "compile_policy": self.compile_policy,
            "cudagraph_policy": self.cudagraph_policy,
            "exploration_type": self.exploration,
            "max_frames_per_traj": self.max_frames_per_traj,
            "reset_at_each_iter": self.reset_at_each_iter,
            "next_observation": self.next_observation,
            "resume_episodes": self.resume_episodes,
            "init_random_frames": config.algo.random_frames,
            "timeout": self.timeout_s,
        }

    def pacing(self, config: Any, batches_ahead: int) -> dict[str, Any]:
        """The arguments that limit how far asynchronous workers run ahead of the learner."""
        waits = config.sync.on_stale == "wait"
        return {
            "batches_ahead": batches_ahead,
            "max_lag": config.sync.max_lag if waits else None,
        }

    def check(self, config: Any) -> None:
        self._check_frames(config.env.num_envs)
        if self.cudagraph_policy and "cuda" not in str(self.devices.policy):
            raise ConfigError("collector.cudagraph_policy=true needs collector.devices.policy=cuda")
        devices = self.devices.policy
        if isinstance(devices, list) and len(devices) != self.workers:
            raise ConfigError(
                f"collector.devices.policy=[{','.join(devices)}] names {len(devices)} devices for "
                f"{self.workers} workers: name one, or as many as there are workers"
            )

    def _check_frames(self, num_envs: int) -> None:
        """Each environment gives the same number of frames to a batch."""
        together, frames = self.workers_of_a_batch, self.frames_per_batch
        sharing = together * num_envs
        if frames % sharing:
            least, most = frames // sharing * sharing, (frames // sharing + 1) * sharing
            near = most if frames - least > most - frames or not least else least
            who = f"{together} workers with {num_envs}" if together > 1 else f"{num_envs}"
            raise ConfigError(
                f"collector.frames_per_batch={frames} cannot be divided among {who} environments; "
                f"the nearest that can is {near}"
            )


@dataclass
class SingleConfig(CollectorConfig):
    """One process collects and trains in turn. Same seed, same bits."""

    name: str = "single"


@dataclass
class WorkersConfig(CollectorConfig):
    """Options of collectors with worker processes. Derive from this for your own collector."""

    num_workers: Workers = 2  # processes that step environments
    free_running: bool = False  # fill the replay buffer in the background (algo=sac, algo=dqn)
    # free_running: overwrite frames in the replay buffer that the learner has not seen, where
    # workers are so far ahead of it; by default they wait
    overwrite: bool = False
    num_threads: Threads = 1  # torch threads of each worker
    on_worker_failure: Literal["raise", "restart"] = "raise"  # end the run, or replace the worker
    max_restarts: NonNegativeInt = 3  # of all workers together; the next failure ends the run

    @property
    def workers(self) -> int:
        return self.num_workers

    @property
    def place(self) -> str:
        return "on this machine"

    @property
    def fills_replay_buffer(self) -> bool:
        return self.free_running

    @property
    def overwrites(self) -> bool:
        return self.overwrite

    def check(self, config: Any) -> None:
        super().check(config)
        if self.overwrite and not self.free_running:
            raise ConfigError(
                "collector.overwrite=true needs collector.free_running=true: the learner sees each "
                "frame of other collectors"
            )
        size = getattr(config.algo, "buffer_size", None)
        least = 2 * self.frames_per_batch
        if self.free_running and not self.overwrite and size is not None and size < least:
            raise ConfigError(
                f"algo.buffer_size={size}: expected {least} or more with "
                f"collector.free_running=true collector.frames_per_batch={self.frames_per_batch}, "
                "since workers overwrite no frame that the learner has not seen"
            )

    def arguments(self, config: Any) -> dict[str, Any]:
        arguments = super().arguments(config) | {
            "num_workers": self.num_workers,
            "num_sub_threads": self.num_threads,
            "on_worker_failure": self.on_worker_failure,
        }
        if self.on_worker_failure == "restart":
            arguments["max_restarts"] = self.max_restarts
        return arguments


@dataclass
class MultiSyncConfig(WorkersConfig):
    """Workers collect together; the learner trains while they wait. Same seed, same bits."""

    name: str = "multi_sync"
    frames_per_batch: Count = 1024  # frames of one batch, all workers together
    # stop the other workers when this share has finished; null: wait for all
    preemptive_threshold: PositiveShare | None = None

    @property
    def workers_of_a_batch(self) -> int:
        return self.num_workers

    @property
    def preempts(self) -> bool:
        return self.preemptive_threshold is not None

    def arguments(self, config: Any) -> dict[str, Any]:
        share = self.preemptive_threshold
        added = {} if share is None else {"preemptive_threshold": share}
        return super().arguments(config) | added


@dataclass
class MultiAsyncConfig(WorkersConfig):
    """Workers collect at their own pace while the learner trains; a batch is from one worker."""

    name: str = "multi_async"
    frames_per_batch: Count = 512  # frames of one batch, from one worker
    batches_ahead: Count = 2  # that a worker may finish before the learner takes one

    @property
    def asynchronous(self) -> bool:
        return True

    def arguments(self, config: Any) -> dict[str, Any]:
        return super().arguments(config) | self.pacing(config, self.batches_ahead)


# -- on other machines


@dataclass
class RemoteConfig(Options):
    """Workers on other machines: each is a process of its own."""

    group: ClassVar[str] = "collector.remote"

    asynchronous: bool = False  # whether each worker collects at its own pace, not all together
    start_timeout_s: Seconds = 120.0  # until all workers have their environments and weights


@dataclass
class JoiningConfig(RemoteConfig):
    """Workers that connect to the trainer: who starts them, and the trainer's address."""

    # local: start the workers here; env: torchrun or a script started them; null: detect which
    launcher: Literal["local", "env"] | None = None
    host: str = "127.0.0.1"  # launcher=local: the address at which workers reach the trainer
    port: Port = 0  # launcher=local: its port; 0: a free one
    address: str | None = None  # the address that this process's connections bind to; null: host


@dataclass
class RayConfig(RemoteConfig):
    """The Ray cluster, and the resources that each worker reserves."""

    address: str | None = None  # a running cluster: auto or host:port; null: start one here
    num_cpus: NonNegative = 1.0  # CPUs to reserve for each worker
    num_gpus: NonNegative = 0.0  # GPUs to reserve for each worker
    # other resources of the cluster to reserve for each worker
    resources: dict[str, float] = field(default_factory=dict)


def ranks() -> int | None:
    """The number of processes that a launcher started; None without a launcher."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if "RANK" in os.environ and size.isdigit() else None


def workers_started(otherwise: int) -> int:
    """One worker for each rank besides the trainer's; without ranks, `otherwise`."""
    return max(1, (ranks() or otherwise + 1) - 1)


@dataclass
class RemoteCollectorConfig(WorkersConfig):
    """Options of collectors whose workers are on other machines."""

    frames_per_batch: Count = 1024  # of all workers together; remote.asynchronous: of one
    batches_ahead: Count = 2  # remote.asynchronous: that a worker may finish before one is taken
    remote: RemoteConfig = field(default_factory=RemoteConfig)

    @property
    def is_remote(self) -> bool:
        return True

    @property
    def place(self) -> str:
        return "on this machine"

    @property
    def workers_of_a_batch(self) -> int:
        return 1 if self.asynchronous else self.num_workers

    @property
    def asynchronous(self) -> bool:
        return self.remote.asynchronous

    def arguments(self, config: Any) -> dict[str, Any]:
        arguments = super().arguments(config) | {
            "num_collectors": self.num_workers,
            "sync": not self.remote.asynchronous,
            "start_timeout": self.remote.start_timeout_s,
        }
        del arguments["num_workers"]
        return arguments | (self.pacing(config, self.batches_ahead) if self.asynchronous else {})

    def check(self, config: Any) -> None:
        super().check(config)
        if self.batches_ahead != 2 and not self.asynchronous:
            raise ConfigError(
                f"collector.batches_ahead={self.batches_ahead} needs "
                "collector.remote.asynchronous=true or collector=multi_async: otherwise a batch "
                "is started when the learner requests it"
            )


@dataclass
class JoiningCollectorConfig(RemoteCollectorConfig):
    """Options of collectors whose workers connect to the trainer."""

    # rollout workers on all machines; with ranks, one for each but the trainer's
    num_workers: Workers = field(default=2, metadata=linked("${lockstep.workers:2}"))
    remote: JoiningConfig = field(default_factory=JoiningConfig)

    @property
    def joins_ranks(self) -> bool:
        """Whether the workers are ranks that a launcher, such as torchrun, has started."""
        return self.remote.launcher != "local" and bool(ranks())

    @property
    def place(self) -> str:
        return "in other ranks" if self.joins_ranks else super().place

    def arguments(self, config: Any) -> dict[str, Any]:
        where = ("launcher", "host", "port", "address")
        return super().arguments(config) | {name: getattr(self.remote, name) for name in where}

    def check(self, config: Any) -> None:
        super().check(config)
        started = ranks()
        if self.remote.launcher == "env" and started is None:
            raise ConfigError(
                "collector.remote.launcher=env: RANK and WORLD_SIZE are not set; start it with "
                "torchrun, or use collector.remote.launcher=local"
            )
        if started is not None and self.joins_ranks:
            if started < 2:
                raise ConfigError(
                    "WORLD_SIZE=1: rank 0 trains and the others collect; start at least two "
                    "processes"
                )
            if self.num_workers != started - 1:
                raise ConfigError(
                    f"WORLD_SIZE={started}, so there are {started - 1} workers, not "
                    f"{self.num_workers}: omit collector.num_workers, or start "
                    f"{self.num_workers + 1} processes (each rank but the trainer's is a worker)"
                )


@dataclass
class DistributedCollectorConfig(JoiningCollectorConfig):
    """Workers elsewhere over torch.distributed, started by this command, torchrun or SLURM."""

    scheme: ClassVar[str | None] = "distributed"

    name: str = "distributed"


@dataclass
class RPCCollectorConfig(JoiningCollectorConfig):
    """Workers elsewhere over torch's RPC, started by this command, torchrun or SLURM."""

    scheme: ClassVar[str | None] = "rpc"

    name: str = "rpc"

    def check(self, config: Any) -> None:
        super().check(config)
        if self.on_worker_failure == "restart":
            raise ConfigError(
                "collector.on_worker_failure=restart: torch's RPC cannot replace a process that "
                "died; use collector=distributed sync=distributed"
            )


@dataclass
class RayCollectorConfig(RemoteCollectorConfig):
    """Workers on a Ray cluster: a running one, or one that is started for this run."""

    scheme: ClassVar[str | None] = "ray"

    name: str = "ray"
    remote: RayConfig = field(default_factory=RayConfig)

    @property
    def place(self) -> str:
        if self.remote.address is None:
            return super().place
        return f"on the Ray cluster {self.remote.address}"

    def arguments(self, config: Any) -> dict[str, Any]:
        takes = {
            "num_cpus": self.remote.num_cpus,
            "num_gpus": self.remote.num_gpus,
            "resources": self.remote.resources,
        }
        cluster = {"address": self.remote.address, "remote_configs": takes}
        return super().arguments(config) | cluster

    def check(self, config: Any) -> None:
        super().check(config)
        require("collector=ray", "ray", "ray")
