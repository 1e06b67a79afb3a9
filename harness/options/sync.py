"""`sync=`: options of the schemes that move weights to the workers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from collectors.options.check_types import (
    Count,
    NonNegative,
    NonNegativeInt,
    Positive,
    Seconds,
    Share,
)
from harness.errors import ConfigError, ImpossiblePair, show, suggest
from harness.options.base import Options, linked


@dataclass
class LinkConfig(Options):
    """The network to emulate between learner and workers: a preset, and changes to it."""

    group: ClassVar[str] = "sync.link"

    preset: Literal["lan", "datacenter", "wan"] | None = (
        None  # a typical network; other options override it
    )
    latency_ms: NonNegative | None = None  # latency in each direction
    jitter_ms: NonNegative | None = None  # the largest random extra latency towards the worker
    bandwidth_mbps: Positive | None = None  # megabits per second
    loss: Share | None = None  # the share of packets that have to be sent again
    seed: int = field(default=0, metadata=linked("${seed}"))  # of jitter and loss

    def make(self) -> Any:
        """The `sync.Link`; None if nothing is delayed. `ConfigError` for impossible values."""
        from sync import PRESETS, Link

        base = Link() if self.preset is None else PRESETS[self.preset]
        values = {key: value for key, value in asdict(self).items() if value is not None}
        values.pop("preset", None)
        try:
            return Link.of(Link(**{**asdict(base), **values}))
        except ValueError as error:
            raise ConfigError(f"sync.link.{error}") from None


@dataclass
class TearConfig(Options):
    """Torn weights on purpose: how much of each version is older than the rest."""

    group: ClassVar[str] = "sync.tear"

    share: Share = 0.0  # the share of tensors or elements of each version that are older
    span: Count = 1  # how many versions older they are
    unit: Literal["tensor", "element"] = "tensor"  # choose whole tensors, or single elements
    seed: int = field(default=0, metadata=linked("${seed}"))  # of the choice

    def make(self) -> Any:
        """The `sync.Tear`; None if nothing is torn."""
        from sync import Tear

        return Tear.of(Tear(**asdict(self)))


@dataclass
class SyncConfig(Options):
    """Options of every scheme. Fields that a subclass adds go to its scheme's constructor."""

    group: ClassVar[str] = "sync"
    versions_travel: ClassVar[bool] = True  # else workers see each change of the weights at once
    collector: ClassVar[str | None] = None  # the only collector that it goes with

    name: str = ""  # the registered name
    blocking: bool = False  # whether publishing waits until every worker uses the new version
    interval: Count = 1  # publish after this many updates
    # when workers look for a new version: before each step, batch or episode (env.num_envs=1)
    apply_at: Literal["step", "batch", "episode"] = "step"
    # the state of a recurrent policy when new weights are applied during an episode: kept, zero, or
    # computed anew by them from all observations of the episode
    state_on_update: Literal["keep", "zero", "recompute"] = "keep"
    max_lag: NonNegativeInt | None = None  # the largest lag of frames to train on, in versions
    # how max_lag is enforced: drop such frames, keep them without weight in the loss (mask), or let
    # asynchronous workers wait; with apply_at=episode, frames still age until their episode ends
    on_stale: Literal["drop", "mask", "wait"] = "drop"
    # which weights of a model are sent; state_dict: without non-persistent buffers
    strategy: Literal["tensordict", "state_dict"] = "tensordict"
    # refuse to publish NaN and infinite parameters; all: also in buffers
    check_finite: bool | Literal["all"] = True
    # a publish without acknowledgement is an error after this long; null: collector.timeout_s
    timeout_s: Seconds | None = None
    connect_timeout_s: Seconds = 60.0  # a worker that does not connect is an error after this long

    def arguments(self) -> dict[str, Any]:
        """The arguments of the scheme's constructor."""
        common = {field.name for field in fields(SyncConfig)}
        added = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}
        return {
            "strategy": self.strategy,
            "sync": self.blocking,
            "timeout": self.timeout_s,
            "connect_timeout": self.connect_timeout_s,
            "check_finite": self.check_finite,
            **added,
        }

    def resolved(self, config: Any) -> dict[str, Any]:
        """What options that are null stand for in a run with this `Config`."""
        return {}

    def check(self, config: Any) -> None:
        self._check_pair(config.collector)
        if self.apply_at == "episode" and config.env.num_envs != 1:
            raise ImpossiblePair(
                f"sync.apply_at=episode env.num_envs={config.env.num_envs}: episodes of several "
                "environments start at different steps; use env.num_envs=1 and more workers"
            )
        if self.apply_at == "episode" and not self.versions_travel:
            raise ImpossiblePair(
                f"sync.apply_at=episode sync={self.name}: its weights change at once, also during "
                "an episode; use sync=shared_mem"
            )
        if self.state_on_update != "keep" and not config.model.recurrent:
            raise ImpossiblePair(
                f"sync.state_on_update={self.state_on_update} model={config.model.name}: it has "
                "no state; use model=lstm"
            )
        if self.on_stale == "mask" and self.max_lag is None:
            raise ConfigError(
                "sync.on_stale=mask needs sync.max_lag: frames that lag more have no weight"
            )
        if self.on_stale == "wait" and (self.max_lag is None or not config.collector.asynchronous):
            missing = "sync.max_lag" if self.max_lag is None else "collector=multi_async"
            raise ConfigError(
                f"sync.on_stale=wait needs {missing}: asynchronous workers wait so that their "
                "frames lag by at most max_lag"
            )

    def _check_pair(self, collector: Any) -> None:
        """Raise `ImpossiblePair` for a scheme and a collector that cannot go together."""
        pair = f"sync={self.name} collector={collector.name}"
        if collector.simulates:
            if not self.versions_travel:
                raise ImpossiblePair(
                    f"{pair}: its workers see every change of the learner's weights at once, which "
                    "cannot be simulated; use sync=shared_mem"
                )
            return
        if collector.scheme is not None and self.name != collector.scheme:
            raise ImpossiblePair(
                f"{pair}: this collector needs its own scheme; use sync={collector.scheme}"
            )
        if self.collector is not None and collector.name != self.collector:
            raise ImpossiblePair(
                f"{pair}: the collector's workers are on this machine; "
                f"use sync=shared_mem, or collector={self.collector}"
            )


@dataclass
class NoneConfig(SyncConfig):
    """Nothing is sent: the learner's own policy acts. For collector=single."""

    versions_travel: ClassVar[bool] = False

    name: str = "none"

    def check(self, config: Any) -> None:
        super().check(config)
        policy = config.collector.devices.policy
        places = [config.device, *(policy if isinstance(policy, list) else [policy])]
        if len({"cuda:0" if place == "cuda" else place for place in places}) > 1:
            raise ConfigError(
                f"sync=none with device={config.device} and collector.devices.policy={policy}: "
                "the learner's own policy acts, so name one device for both; "
                "or use sync=shared_mem"
            )

    def _check_pair(self, collector: Any) -> None:
        super()._check_pair(collector)
        if collector.name != "single":
            raise ImpossiblePair(
                f"sync=none collector={collector.name}: its workers would keep their initial "
                "weights forever; use sync=shared_mem, or collector=single"
            )


@dataclass
class HogwildConfig(SyncConfig):
    """Workers read the learner's own memory while it trains: no copies, torn weights."""

    versions_travel: ClassVar[bool] = False

    name: str = "hogwild"

    def check(self, config: Any) -> None:
        super().check(config)
        places = {
            "device": config.device,
            "collector.devices.policy": config.collector.devices.policy,
        }
        for place, named in places.items():
            if any(device != "cpu" for device in (named if isinstance(named, list) else [named])):
                raise ConfigError(
                    f"sync=hogwild with {place}={named}: its workers read the learner's own "
                    "memory, so both must be cpu; use sync=shared_mem"
                )

    def _check_pair(self, collector: Any) -> None:
        super()._check_pair(collector)
        if collector.name == "single":
            raise ImpossiblePair(
                "sync=hogwild collector=single: there is no other process to share memory with; "
                "use sync=none, with which the learner's own policy acts"
            )


@dataclass
class SendingConfig(SyncConfig):
    """Options of schemes that send versions. Derive from this for your own scheme."""

    # number format in which weights travel: float32 (unchanged), bfloat16, float16 or int8
    wire: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    # let a lossy wire format round the policy's buffers as well, such as bounds of its actions
    round_buffers: bool = False
    # emulate a slow network (docs/slow-links.md)
    link: LinkConfig = field(default_factory=LinkConfig)
    # updates between the weights that act and the learner's: a number, or a distribution such as
    # {kind: uniform, low: 0, high: 8}; also geometric (mean, most), cycle (values), two_point (low,
    # high, share of high); per: version draws for each version, per: worker once for each worker
    lag: NonNegativeInt | dict[str, Any] = 0
    lag_seed: int = field(default=0, metadata=linked("${seed}"))  # of lags that are drawn
    # make a part of each version older
    tear: TearConfig = field(default_factory=TearConfig)
    # workers compare their weights with what was published: at each policy call, or one in 100
    verify: Literal["off", "sampled", "every", False] = "off"

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        del arguments["lag_seed"]
        effects = {"link": self.link.make(), "lag": self.make_lag(), "tear": self.tear.make()}
        effects["verify"] = self.verify or "off"  # YAML reads `off` as false
        return arguments | effects

    def make_lag(self) -> Any:
        """The `sync.Lag`; None if there is none. `ConfigError` for impossible values."""
        from sync import Lag

        values = self.lag if isinstance(self.lag, dict) else {"k": self.lag}
        names = [option.name for option in fields(Lag) if option.name != "seed"]
        for key in values:
            if key not in names:
                hint = suggest(key, names, prefix="sync.lag.")
                raise ConfigError(f"sync.lag.{key}: there is no such option; {hint}")
        try:
            return Lag.of(Lag(**values, seed=self.lag_seed))
        except ValueError as error:
            raise ConfigError(f"sync.lag.{error}") from None

    def check(self, config: Any) -> None:
        super().check(config)
        self.link.make()
        if (lag := self.make_lag()) is not None:
            self._check_lag(lag)

    def _check_lag(self, lag: Any) -> None:
        """Raise `ConfigError` if other options contradict the lag."""
        typed = f"sync.lag={show(self.lag)}"
        if self.interval > 1:
            raise ConfigError(
                f"{typed} sync.interval={self.interval}: an exact lag needs every update to be "
                "published; use sync.interval=1"
            )
        if self.on_stale == "wait":
            raise ConfigError(
                f"{typed} sync.on_stale=wait: a waiting worker would get no newer weights, because "
                "lag counts updates; use sync.on_stale=drop"
            )
        if self.max_lag is not None and self.max_lag < lag.smallest:
            raise ConfigError(
                f"{typed} sync.max_lag={self.max_lag}: all frames but the first would be dropped; "
                f"use sync.max_lag={lag.largest} or more"
            )


@dataclass
class SharedMemConfig(SendingConfig):
    """Each version is written once into shared memory; workers take the newest."""

    name: str = "shared_mem"
    # let parameters point at the shared block, read-only, instead of copying it; null: wherever
    # that is possible, in CPU memory and with wire=float32
    zero_copy: bool | None = None

    def resolved(self, config: Any) -> dict[str, Any]:
        if self.zero_copy is not None:
            return {}
        devices = config.collector.devices.policy
        on_cpu = {"cpu"} == set(devices if isinstance(devices, list) else [devices])
        return {"zero_copy": on_cpu and self.wire == "float32"}

    def check(self, config: Any) -> None:
        super().check(config)
        if self.zero_copy and self.wire != "float32":
            raise ConfigError(
                f"sync.zero_copy=true sync.wire={self.wire}: encoded versions must be decoded into "
                "other memory; use sync.wire=float32"
            )


@dataclass
class MultiProcessConfig(SendingConfig):
    """Each worker gets a message for each version."""

    name: str = "multiprocess"


@dataclass
class DistributedConfig(SendingConfig):
    """Sent to each worker over torch.distributed."""

    collector: ClassVar[str | None] = "distributed"

    name: str = "distributed"


@dataclass
class RPCConfig(SendingConfig):
    """Sent to each worker over torch's RPC."""

    collector: ClassVar[str | None] = "rpc"

    name: str = "rpc"


@dataclass
class RaySyncConfig(SendingConfig):
    """Put into Ray's object store, which sends each version to each machine once."""

    collector: ClassVar[str | None] = "ray"

    name: str = "ray"
