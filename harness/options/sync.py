"""`sync=`: the options of the schemes by which weights reach the workers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from harness.options.base import Options, linked
from harness.options.errors import ConfigError, ImpossiblePair, suggest
from harness.options.typed import (
    Count,
    NonNegative,
    NonNegativeInt,
    Positive,
    Seconds,
    Share,
    show,
)


@dataclass
class LinkConfig(Options):
    """The network between learner and workers to emulate: a preset, and what differs from it."""

    group: ClassVar[str] = "sync.link"

    preset: Literal["lan", "datacenter", "wan"] | None = (
        None  # a typical network; options set beside it win
    )
    latency_ms: NonNegative | None = None  # each way
    jitter_ms: NonNegative | None = None  # up to this much more on the way there, at random
    bandwidth_mbps: Positive | None = None  # megabits a second
    loss: Share | None = None  # the share of packets that have to be sent again
    seed: int = field(default=0, metadata=linked("${seed}"))  # of jitter and loss

    def make(self) -> Any:
        """The `sync.Link`; None if nothing is delayed. `ConfigError` for impossible values."""
        from sync import PRESETS, Link

        base = Link() if self.preset is None else PRESETS[self.preset]
        given = {key: value for key, value in asdict(self).items() if value is not None}
        given.pop("preset", None)
        try:
            return Link.of(Link(**{**asdict(base), **given}))
        except ValueError as error:
            raise ConfigError(f"sync.link.{error}") from None


@dataclass
class TearConfig(Options):
    """Torn weights on purpose: how much of each version is older than the rest."""

    group: ClassVar[str] = "sync.tear"

    share: Share = 0.0  # of the tensors or elements of each version that are older
    span: Count = 1  # so many versions older
    unit: Literal["tensor", "element"] = "tensor"  # whether tensors are older as a whole
    seed: int = field(default=0, metadata=linked("${seed}"))  # of the choice

    def make(self) -> Any:
        """The `sync.Tear`; None if nothing is torn."""
        from sync import Tear

        return Tear.of(Tear(**asdict(self)))


@dataclass
class SyncConfig(Options):
    """Options that every scheme has. What a class adds is passed to its scheme's constructor."""

    group: ClassVar[str] = "sync"
    versions_travel: ClassVar[bool] = True  # else workers see each change of the weights at once
    collector: ClassVar[str | None] = None  # the only collector that it goes with

    name: str = ""  # the registered name
    blocking: bool = False  # whether publishing waits until every worker uses the new version
    interval: Count = 1  # publish after every so many updates
    # when workers look for a new version: before each step, batch or episode (env.num_envs=1)
    apply_at: Literal["step", "batch", "episode"] = "step"
    # what an update in mid-episode does to the state of a recurrent policy
    state_on_update: Literal["keep", "zero"] = "keep"
    max_lag: NonNegativeInt | None = None  # train on no frame whose weights are more versions old
    # how max_lag is kept: drop such frames, or let asynchronous workers wait so that there are none
    on_stale: Literal["drop", "wait"] = "drop"
    # how a model is turned into weights
    strategy: Literal["tensordict", "state_dict"] = "tensordict"
    # refuse to publish NaN and infinite parameters; all: buffers, too
    check_finite: bool | Literal["all"] = True
    timeout_s: Seconds = 10.0  # an unanswered publish is an error after this long
    connect_timeout_s: Seconds = 60.0  # and so is a worker that does not come up

    def arguments(self) -> dict[str, Any]:
        """What the scheme's constructor is called with."""
        common = {field.name for field in fields(SyncConfig)}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}
        return {
            "strategy": self.strategy,
            "sync": self.blocking,
            "timeout": self.timeout_s,
            "connect_timeout": self.connect_timeout_s,
            "check_finite": self.check_finite,
            **own,
        }

    def check(self, config: Any) -> None:
        self._check_pair(config.collector)
        if self.apply_at == "episode" and config.env.num_envs != 1:
            raise ConfigError(
                f"sync.apply_at=episode env.num_envs={config.env.num_envs}: episodes of several "
                "environments start at different steps; take env.num_envs=1 and more workers"
            )
        if self.apply_at == "episode" and not self.versions_travel:
            raise ConfigError(
                f"sync.apply_at=episode sync={self.name}: its weights change at once, in an "
                "episode too; take sync=shared_mem"
            )
        if self.state_on_update == "zero" and not config.model.recurrent:
            raise ConfigError(
                f"sync.state_on_update=zero model={config.model.name}: it carries no state; "
                "take model=lstm"
            )
        if self.on_stale == "wait" and (self.max_lag is None or not config.collector.asynchronous):
            missing = "sync.max_lag" if self.max_lag is None else "collector=multi_async"
            raise ConfigError(
                f"sync.on_stale=wait needs {missing}: asynchronous workers wait so that no frame "
                "lags by more than max_lag"
            )

    def _check_pair(self, collector: Any) -> None:
        """Raise `ImpossiblePair` for a scheme and a collector that cannot go together."""
        pair = f"sync={self.name} collector={collector.name}"
        if collector.simulates:
            if not self.versions_travel:
                raise ImpossiblePair(
                    f"{pair}: its workers see every change of the learner's weights at once, which "
                    "no simulated clock can time; take sync=shared_mem"
                )
            return
        if collector.scheme is not None and self.name != collector.scheme:
            raise ImpossiblePair(
                f"{pair}: this collector has a scheme of its own; take sync={collector.scheme}"
            )
        if self.collector is not None and collector.name != self.collector:
            raise ImpossiblePair(
                f"{pair}: its workers are on this machine; "
                f"take sync=shared_mem, or collector={self.collector}"
            )


@dataclass
class NoneConfig(SyncConfig):
    """Nothing is sent: the policy that acts is the learner's own. For collector=single."""

    versions_travel: ClassVar[bool] = False

    name: str = "none"

    def _check_pair(self, collector: Any) -> None:
        super()._check_pair(collector)
        if collector.name != "single":
            raise ImpossiblePair(
                f"sync=none collector={collector.name}: its workers would keep the weights they "
                "start with for ever; take sync=shared_mem, or collector=single"
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
                    "memory, so both must be cpu; take sync=shared_mem"
                )

    def _check_pair(self, collector: Any) -> None:
        super()._check_pair(collector)
        if collector.name == "single":
            raise ImpossiblePair(
                "sync=hogwild collector=single: one process has nobody to share its memory with; "
                "take sync=none, where the policy is the learner's own"
            )


@dataclass
class SendingConfig(SyncConfig):
    """Options of schemes that send versions: derive from this for a scheme of your own."""

    # how numbers travel: float32 (as they are), bfloat16, float16, int8 or delta
    wire: Literal["float32", "bfloat16", "float16", "int8", "delta"] = "float32"
    # let versions arrive as late as over a network (docs/slow-links.md)
    link: LinkConfig = field(default_factory=LinkConfig)
    # updates between the weights that act and the learner's: a number, or a distribution, as
    # {kind: uniform, low: 0, high: 8}; also geometric (mean, most), cycle (values), two_point (low,
    # high, share of high); per: version draws for each version, per: worker once for each worker
    lag: NonNegativeInt | dict[str, Any] = 0
    lag_seed: int = field(default=0, metadata=linked("${seed}"))  # of lags that are drawn
    # let each version be older in part
    tear: TearConfig = field(default_factory=TearConfig)
    # workers compare their weights with what was published: at each policy call, or one in 100
    verify: Literal["off", "sampled", "every", False] = "off"

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        del arguments["lag_seed"]
        made = {"link": self.link.make(), "lag": self.make_lag(), "tear": self.tear.make()}
        made["verify"] = self.verify or "off"  # YAML reads `off` as false
        return arguments | made

    def make_lag(self) -> Any:
        """The `sync.Lag`; None if there is none. `ConfigError` for impossible values."""
        from sync import Lag

        given = self.lag if isinstance(self.lag, dict) else {"k": self.lag}
        known = [option.name for option in fields(Lag) if option.name != "seed"]
        for key in given:
            if key not in known:
                hint = suggest(key, known, prefix="sync.lag.")
                raise ConfigError(f"sync.lag.{key}: there is no such option; {hint}")
        try:
            return Lag.of(Lag(**given, seed=self.lag_seed))
        except ValueError as error:
            raise ConfigError(f"sync.lag.{error}") from None

    def check(self, config: Any) -> None:
        super().check(config)
        self.link.make()
        if (lag := self.make_lag()) is not None:
            self._check_lag(lag)

    def _check_lag(self, lag: Any) -> None:
        """Raise `ConfigError` if the lag cannot be what it says."""
        given = f"sync.lag={show(self.lag)}"
        if self.interval > 1:
            raise ConfigError(
                f"{given} sync.interval={self.interval}: lag counts updates, of which the interval "
                "leaves most unpublished; take sync.interval=1"
            )
        if self.on_stale == "wait":
            raise ConfigError(
                f"{given} sync.on_stale=wait: a worker that waits gets no newer weights, since lag "
                "counts updates; take sync.on_stale=drop"
            )
        if self.max_lag is not None and self.max_lag < lag.smallest:
            raise ConfigError(
                f"{given} sync.max_lag={self.max_lag}: all frames would be dropped but the first; "
                f"take sync.max_lag={lag.largest} or more"
            )


@dataclass
class SharedMemConfig(SendingConfig):
    """Each version is written once into shared memory; workers take the newest."""

    name: str = "shared_mem"
    # let parameters point at the shared block, read-only, instead of copying it
    zero_copy: bool = False

    def check(self, config: Any) -> None:
        super().check(config)
        if self.zero_copy and self.wire != "float32":
            raise ConfigError(
                f"sync.zero_copy=true sync.wire={self.wire}: encoded versions must be decoded into "
                "other memory; take sync.wire=float32"
            )


@dataclass
class MultiProcessConfig(SendingConfig):
    """Each version is announced to each worker by a message."""

    name: str = "multiprocess"


@dataclass
class DistributedConfig(SendingConfig):
    """Sent once to each node by torch.distributed, and shared by its workers."""

    collector: ClassVar[str | None] = "distributed"

    name: str = "distributed"


@dataclass
class RPCConfig(SendingConfig):
    """Sent once to each node by torch.distributed.rpc, and shared by its workers."""

    collector: ClassVar[str | None] = "rpc"

    name: str = "rpc"


@dataclass
class RaySyncConfig(SendingConfig):
    """Put into Ray's object store, which brings each version to each node once."""

    collector: ClassVar[str | None] = "ray"

    name: str = "ray"
