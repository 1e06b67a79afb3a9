"""`collector=simulated`: the simulated cluster's costs, network and failures."""

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
    """How versions are sent to the workers. `sync.link` describes the link of each worker."""

    group: ClassVar[str] = "collector.network"

    # megabits per second at the port of the learner, which sends to one worker after another, and
    # of each worker that forwards; null: no limit
    port_mbps: Positive | None = None
    topology: Literal["star", "tree"] = "star"  # tree: workers forward versions to others
    fan_out: Count = 2  # tree: the number of workers that each one sends to

    def make(self) -> Any:
        """The `Network`."""
        from collectors.schedule.network import Network

        return Network(**asdict(self))


@dataclass
class FailureConfig(Options):
    """A worker that dies and comes back later."""

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
