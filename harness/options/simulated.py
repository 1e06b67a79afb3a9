"""`collector=simulated`: the options of a cluster that exists in virtual time only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from harness.options.base import Options
from harness.options.collectors import CollectorConfig, Threads, Workers
from harness.options.errors import ConfigError, ImpossiblePair
from harness.options.typed import (
    Count,
    NonNegative,
    NonNegativeInt,
    Positive,
    Range,
    Share,
)

SCHEDULE = "schedule.jsonl"  # in a run directory
Milliseconds = Annotated[float, Range(0, 1e9)]


@dataclass
class CostConfig(Options):
    """A cost that varies: a distribution."""

    kind: Literal["constant", "uniform", "normal", "lognormal", "exponential", "gamma"] = "constant"
    mean: Milliseconds = 0.0  # in milliseconds
    cv: NonNegative | None = None  # standard deviation / mean
    each: Literal["step", "batch"] = "step"  # whether a worker draws for each step or batch


@dataclass
class StragglersConfig(Options):
    """Workers that are slower than the others."""

    group: ClassVar[str] = "collector.costs.stragglers"

    share: Share = 0.0  # of the workers, the last ones
    factor: Positive = 1.0  # how many times as long they take


@dataclass
class CostsConfig(Options):
    """How long everything takes, in milliseconds: a number, or {kind:, mean:, cv:, each:}."""

    group: ClassVar[str] = "collector.costs"

    step_ms: Milliseconds | CostConfig = 1.0  # worker: one step of its environments
    policy_ms: Milliseconds | CostConfig = 0.3  # worker: one policy call
    take_ms: Milliseconds | CostConfig = 0.5  # learner: assembling a batch
    update_ms: Milliseconds | CostConfig = 20.0  # learner: training on a batch
    publish_ms: Milliseconds | CostConfig = 0.5  # learner: publishing a version
    log_ms: Milliseconds | CostConfig = 0.0  # learner: whatever else it does for each batch
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)

    def make(self) -> Any:
        """The `Costs`. `ConfigError` for an impossible distribution."""
        from collectors.schedule.costs import Cost, Costs, Stragglers

        found = {}
        for name in (f.name for f in fields(self) if f.name != "stragglers"):
            given = getattr(self, name)
            try:
                found[name] = (
                    Cost(given) if isinstance(given, float | int) else Cost(**asdict(given))
                )
            except ValueError as error:
                raise ConfigError(f"collector.costs.{name}.{error}") from None
        return Costs(**found, stragglers=Stragglers(**asdict(self.stragglers)))


@dataclass
class NetworkConfig(Options):
    """How versions are sent to the workers; what each worker's own link is like is sync.link."""

    group: ClassVar[str] = "collector.network"

    # megabits a second that the learner sends to all workers together, one after another; and each
    # worker that forwards; null: no limit
    port_mbps: Positive | None = None
    topology: Literal["star", "tree"] = "star"  # the learner sends to all; or workers forward
    fan_out: Count = 2  # to how many each sends in a tree

    def make(self) -> Any:
        """The `Network`."""
        from collectors.schedule.network import Network

        return Network(**asdict(self))


@dataclass
class FailureConfig(Options):
    """A worker that dies at a time, and is back after another."""

    worker: NonNegativeInt
    at_s: NonNegative  # virtual time since the start
    back_after_s: NonNegative


@dataclass
class SimulatedConfig(CollectorConfig):
    """Asynchronous workers in virtual time, computed by one process. Same seed, same bits."""

    name: str = "simulated"
    num_workers: Workers = 8  # virtual workers; each has env.num_envs environments
    frames_per_batch: Count = 512  # frames of one batch, from one worker
    batches_ahead: Count = 2  # that a worker may finish before the learner takes one
    num_threads: Threads = 1  # torch threads of the policy calls
    costs: CostsConfig = field(default_factory=CostsConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    # workers that die: [{worker:0,at_s:10,back_after_s:5}], in virtual time
    failures: list[FailureConfig] = field(default_factory=list)
    # a run directory whose recorded schedule is followed, in place of costs, network and failures
    replay: str | None = None

    @property
    def workers(self) -> int:
        return self.num_workers

    @property
    def asynchronous(self) -> bool:
        return True

    def arguments(self, config: Any) -> dict[str, Any]:
        link = getattr(config.sync, "link", None)
        return {
            **super().arguments(config),
            **self.pacing(config, self.batches_ahead),
            "num_workers": self.num_workers,
            "num_sub_threads": self.num_threads,
            "costs": self.costs.make(),
            "network": self.network.make(),
            "failures": self._failures(),
            "link": None if link is None else link.make(),
            "blocking": config.sync.blocking,
            "replay": self.replay,
        }

    def _failures(self) -> list[Any]:
        from collectors.schedule.simulated_pool import Failure, checked

        try:
            return checked([Failure(**asdict(one)) for one in self.failures], self.num_workers)
        except ValueError as error:
            raise ConfigError(f"collector.{error}") from None

    def check(self, config: Any) -> None:
        if not config.sync.versions_travel:
            raise ImpossiblePair(
                f"sync={config.sync.name} collector=simulated: its workers would share one policy "
                "with the learner, and no version would travel; take sync=shared_mem"
            )
        super().check(config)
        if isinstance(self.devices.policy, list):
            raise ConfigError(
                "collector.devices.policy is a list: virtual workers compute in one process; name "
                "one device"
            )
        self.costs.make()
        self._failures()
        if self.replay is not None and not (Path(self.replay) / SCHEDULE).is_file():
            raise ConfigError(
                f"collector.replay={self.replay}: no {SCHEDULE} there; collector=multi_async "
                "records one in its run directory"
            )
