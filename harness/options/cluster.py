"""`collector=simulated`: what a simulated cluster is like: costs, network, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from harness.options.base import Options
from harness.options.errors import ConfigError
from harness.options.typed import Count, NonNegative, NonNegativeInt, Positive, Range, Share

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
    """How long everything takes, in milliseconds: numbers or distributions."""

    group: ClassVar[str] = "collector.costs"

    # worker: one step of its environments; instead of a number, this and the others may be
    # {kind:gamma,mean:1,cv:0.5,each:step}: constant, uniform, normal, lognormal, exponential or
    # gamma; of this mean and cv (standard deviation / mean); drawn for each step, or each batch
    step_ms: Milliseconds | CostConfig = 1.0
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


def make_failures(given: Sequence[FailureConfig], num_workers: int) -> list[Any]:
    """The `Failure`s by time. `ConfigError` for one of a worker that is down or does not exist."""
    from collectors.schedule.simulated_pool import Failure, checked

    try:
        return checked([Failure(**asdict(one)) for one in given], num_workers)
    except ValueError as error:
        raise ConfigError(f"collector.{error}") from None
