"""`collector=simulated`: asynchronous workers in virtual time, or a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from collectors.options.check_types import (
    Count,
    Milliseconds,
    NonNegative,
    NonNegativeInt,
    Positive,
    Share,
)
from harness.errors import ConfigError, show
from harness.files import check_ordinary
from harness.options.base import Options
from harness.options.collectors import CollectorConfig, Threads, Workers
from harness.run_directory import SCHEDULE


@dataclass
class CostConfig(Options):
    """A random cost, with its distribution."""

    kind: Literal["constant", "uniform", "normal", "lognormal", "exponential", "gamma"] = "constant"
    mean: Milliseconds = 0.0  # mean in milliseconds
    cv: NonNegative | None = None  # standard deviation / mean
    each: Literal["step", "batch"] = "step"  # draw once per step or once per batch


@dataclass
class StragglersConfig(Options):
    """Workers that are slower than the others."""

    group: ClassVar[str] = "collector.costs.stragglers"

    share: Share = 0.0  # share of the workers that are slow: the last ones
    factor: Positive = 1.0  # how many times as long they take


@dataclass
class CostsConfig(Options):
    """How long everything takes, in milliseconds: numbers or distributions."""

    group: ClassVar[str] = "collector.costs"

    # worker: one step of its environments. This and the others are numbers or distributions such as
    # {kind:gamma,mean:1,cv:0.5,each:step}. kind: constant, uniform, normal, lognormal, exponential
    # or gamma; cv: standard deviation / mean; each: draw per step or per batch
    step_ms: Milliseconds | CostConfig = 1.0
    policy_ms: Milliseconds | CostConfig = 0.3  # worker: one policy call
    take_ms: Milliseconds | CostConfig = 0.5  # learner: assembling a batch
    update_ms: Milliseconds | CostConfig = 20.0  # learner: training on a batch
    publish_ms: Milliseconds | CostConfig = 0.5  # learner: publishing a version
    log_ms: Milliseconds | CostConfig = 0.0  # learner: everything else, per batch
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)

    def make(self) -> Any:
        """The `Costs`. `ConfigError` for an impossible distribution."""
        from collectors.simulation.costs import Cost, Costs, Stragglers

        costs = {}
        for name in (f.name for f in fields(self) if f.name != "stragglers"):
            cost = getattr(self, name)
            try:
                costs[name] = Cost(cost) if isinstance(cost, float | int) else Cost(**asdict(cost))
            except ValueError as error:
                raise ConfigError(f"collector.costs.{name}.{error}") from None
        return Costs(**costs, stragglers=Stragglers(**asdict(self.stragglers)))


@dataclass
class NetworkConfig(Options):
    """How versions are sent to the workers. `sync.link` describes the link of each worker."""

    group: ClassVar[str] = "collector.network"

    # megabits per second at the port of the learner, which sends to one worker after another, and
    # of each worker that forwards; null: no limit
    port_mbps: Positive | None = None
    topology: Literal["star", "tree"] = "star"  # tree: workers forward versions to others
    fan_out: Count = 2  # tree: the number of workers that each one sends to

    def make(self) -> Any:
        """The `Network`."""
        from collectors.simulation.network import Network

        return Network(**asdict(self))


@dataclass
class FailureConfig(Options):
    """A worker that dies and comes back later."""

    worker: NonNegativeInt
    at_s: NonNegative  # virtual time since the start
    back_after_s: NonNegative


def make_failures(failures: Sequence[FailureConfig], num_workers: int) -> list[Any]:
    """The `Failure`s by time. `ConfigError` for one of a worker that is down or does not exist."""
    from collectors.simulation.simulated_pool import Failure, checked

    try:
        return checked([Failure(**asdict(one)) for one in failures], num_workers)
    except ValueError as error:
        raise ConfigError(f"collector.{error}") from None


@dataclass
class SimulatedConfig(CollectorConfig):
    """Asynchronous workers in virtual time, computed by one process. Same seed, same bits."""

    simulates: ClassVar[bool] = True

    name: str = "simulated"
    num_workers: Workers = 8  # virtual workers; each has env.num_envs environments
    frames_per_batch: Count = 512  # frames of one batch, from one worker
    batches_ahead: Count = 2  # that a worker may finish before the learner takes one
    num_threads: Threads = 1  # torch threads of the policy's calls
    costs: CostsConfig = field(default_factory=CostsConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    # workers that die: [{worker:0,at_s:10,back_after_s:5}], in virtual time
    failures: list[FailureConfig] = field(default_factory=list)
    # a run directory whose recorded schedule is replayed, instead of costs, network and failures;
    # it decides the sizes, the seed and, unless given, total_frames
    replay: str | None = None

    @property
    def workers(self) -> int:
        return self.num_workers

    @property
    def place(self) -> str:
        return "in virtual time"

    @property
    def asynchronous(self) -> bool:
        return True

    def arguments(self, config: Any) -> dict[str, Any]:
        arguments = super().arguments(config) | {
            "num_workers": self.num_workers,
            "num_sub_threads": self.num_threads,
        }
        if self.replay is None:
            return arguments | {"schedule": self.simulator(config)}
        return arguments | {"schedule": self.recording(self.replay)}

    def simulator(self, config: Any) -> Any:
        """The simulated schedule. `ConfigError` for impossible costs or failures."""
        from collectors.simulation.simulator import Simulator

        link = getattr(config.sync, "link", None)
        return Simulator(
            num_workers=self.num_workers,
            num_steps=self.frames_per_batch // config.env.num_envs,
            seed=config.seed,
            costs=self.costs.make(),
            network=self.network.make(),
            link=None if link is None else link.make(),
            failures=make_failures(self.failures, self.num_workers),
            blocking=config.sync.blocking,
            apply_at=config.sync.apply_at,
            **self.pacing(config, self.batches_ahead),
        )

    @staticmethod
    def recording(directory: str) -> Any:
        """The schedule that a run recorded; `ConfigError` if it cannot be read."""
        from collectors.schedule.recording import RecordedSchedule

        file = Path(directory) / SCHEDULE
        try:
            check_ordinary(file)
            return RecordedSchedule(file)
        except FileNotFoundError:
            raise ConfigError(
                f"collector.replay={directory}: there is no {SCHEDULE}; a run with "
                "collector=multi_async records one, such as those of -m experiment=recorded"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"collector.replay={directory}: {error}") from None

    def check(self, config: Any) -> None:
        super().check(config)
        if isinstance(self.devices.policy, list):
            raise ConfigError(
                "collector.devices.policy is a list, but virtual workers run in one process; name "
                "one device"
            )
        self.costs.make()
        make_failures(self.failures, self.num_workers)
        lag = getattr(config.sync, "lag", 0)
        if self.network.topology == "tree" and isinstance(lag, dict) and lag.get("per") == "worker":
            raise ConfigError(
                f"collector.network.topology=tree sync.lag={show(lag)}: the workers of a tree "
                "forward one version to all; use collector.network.topology=star"
            )
        if self.replay is not None:
            self._check_sizes(self.replay, config)

    def _check_sizes(self, replay: str, config: Any) -> None:
        header = self.recording(replay).header
        wanted = {
            "collector.num_workers": (self.num_workers, header.num_workers),
            "collector.frames_per_batch": (self.frames_per_batch, header.frames_per_batch),
            "env.num_envs": (config.env.num_envs, header.num_envs),
        }
        if any(value != recorded for value, recorded in wanted.values()):
            needed = " ".join(f"{name}={recorded}" for name, (_, recorded) in wanted.items())
            raise ConfigError(
                f"collector.replay={replay}: it was recorded with other sizes; use {needed}"
            )
