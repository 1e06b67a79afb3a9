"""Registries of everything that a config can name: algorithms, models, schemes, and so on.

    from harness.registry import algorithms

    @algorithms.register("reinforce", options=ReinforceConfig)
    class Reinforce: ...

makes `algo=reinforce` an algorithm, with the fields of ReinforceConfig as its options. The module
must be imported before the config is composed, since it adds options to choose from, and again in
every worker. Two ways lead here. A person names modules for one run, on the command line or in a
config file of their own (`plugins=[my_package.my_module]`); modules in the current directory are
found, too. An installed package declares them by the entry-point group `lockstep.plugins`. A run
directory's stored plugins are imported only if a person names them again.

The parts that come with Lockstep are added below in the same way, by the path of what makes them,
so that nothing heavy is imported here.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from harness.errors import ConfigError, nearest, suggest
from harness.options import algorithms as algo
from harness.options import algorithms as objective
from harness.options import collectors as collect
from harness.options import loggers as log
from harness.options import models as model
from harness.options import simulated, sync
from harness.options.base import Options, build, summary

ENTRY_POINTS = "lockstep.plugins"

Made = TypeVar("Made", bound=Callable[..., Any])


@dataclass(frozen=True)
class Part:
    """One thing that a config can name."""

    name: str
    target: Any  # a class or function, or "module:attribute", which is imported when it is used
    options: type | None = None
    vector: Any = None  # wrappers: what wraps a native vector of environments

    def load(self) -> Any:
        """The class or function."""
        return load(self.target)

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        of_options = "" if self.options is None else summary(self.options)
        return of_options or summary(self.load())


@dataclass
class Registry:
    """Parts of one kind by name."""

    kind: str  # in messages: "algorithm"
    group: str  # where its name is given: "algo"
    base: type | None = None  # the class that the parts' options derive from
    several: bool = False  # whether a config may choose several, each with options below its name
    _parts: dict[str, Part] = field(default_factory=dict)

    def register(
        self, name: str, *, options: type | None = None, vector: Any = None
    ) -> Callable[[Made], Made]:
        """Class or function decorator: make it known under a name."""

        def add(target: Made) -> Made:
            self.add(name, target, options, vector=vector)
            return target

        return add

    def add(
        self, name: str, target: Any, options: type | None = None, *, vector: Any = None
    ) -> None:
        """Make `target` known under a name: a class or function, or "module:attribute"."""
        if options is not None and not (isinstance(options, type) and is_dataclass(options)):
            raise TypeError(f"{self.kind} {name!r}: options is {options!r}, expected a dataclass")
        if self.base is not None and not (options and issubclass(options, self.base)):
            raise TypeError(
                f"{self.kind} {name!r}: its options must derive from {self.base.__name__}, "
                f"got {options!r}"
            )
        registered = self._parts.get(name)
        if registered is not None and path(registered.target) != path(target):
            raise ValueError(
                f"{self.kind} {name!r} is registered already: {path(registered.target)}"
            )
        self._parts[name] = Part(name, target, options, vector)

    def get(self, name: Any) -> Part:
        """The part of this name; an unknown one is a `ConfigError` that names the nearest."""
        if not isinstance(name, str) or name not in self._parts:
            hint = f"{suggest(str(name), self._parts)} (yours? plugins=[module])"
            raise ConfigError(f"{self.group}={name}: there is no such {self.kind}; {hint}")
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts.values())

    def prefix(self, name: str) -> str:
        """What the dotted names of a part's options begin with."""
        return f"{self.group}.{name}." if self.several else f"{self.group}."

    def names(self) -> list[str]:
        """All names."""
        return list(self._parts)


def load(target: Any) -> Any:
    """What "module:attribute" names; anything else is itself."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def path(target: Any) -> str:
    """A target as "module:attribute"."""
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


def choice(value: Any, place: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of something that a config gives as `name` or `{name: {arguments}}`."""
    pairs = list(value.items()) if isinstance(value, dict) else [(value, {})]
    if len(pairs) != 1 or not isinstance(pairs[0][0], str):
        raise ConfigError(f"{place} holds {value!r}, expected a name or {{name: arguments}}")
    name, arguments = pairs[0]
    if not isinstance(arguments, dict | None):
        raise ConfigError(f"{place} gives {name!r} the arguments {arguments!r}, expected a mapping")
    return name, dict(arguments or {})


def chosen_objective(config: algo.PPOConfig) -> tuple[Part, Any]:
    """The objective that an algorithm's options name, and its own options, or None.

    `ConfigError` if there is no such objective, or if it cannot be the method of its name.
    """
    name, arguments = choice(config.objective, "algo.objective")
    part = objectives.get(name)
    if part.options is None:
        if arguments:
            raise ConfigError(f"algo.objective={name} takes no options, got {arguments}")
        return part, None
    options: Any = build(part.options, arguments, f"algo.objective.{name}")
    if isinstance(options, objective.ObjectiveConfig):
        options.check(name, config)
    return part, options


# -- plugins


def load_plugins(modules: Iterable[str]) -> None:
    """Import installed plugins, then these modules; `ConfigError` if one cannot be."""
    _load_installed()
    for module in modules:
        _load(module)


@cache
def _load_installed() -> None:
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            entry_point.load()
        except Exception as error:
            raise ConfigError(
                f"the installed plugin {entry_point.value} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error


def import_named(module: str) -> ModuleType:
    """Import a module that a person has named, also one in the current directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last, so that it hides nothing
    return importlib.import_module(module)


def _load(module: str) -> None:
    if not isinstance(module, str):
        raise ConfigError(f"plugins holds {module!r}, expected the name of a module")
    try:
        import_named(module)
    except (Exception, SystemExit) as error:  # whatever that module does when it is imported
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            near = nearest(module, [file.stem for file in Path.cwd().glob("*.py")])
            hint = "" if near is None else f"; did you mean {near}?"
        raise ConfigError(
            f"plugins=[{module}] cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error


# -- the parts that come with Lockstep

# Made with (options, setup): see harness/algorithms/interface.py.
algorithms = Registry("algorithm", "algo", algo.AlgorithmConfig)
algorithms.add("ppo", "harness.algorithms.ppo:PPO", algo.PPOConfig)
algorithms.add("grpo", "harness.algorithms.grpo:GRPO", algo.GRPOConfig)
algorithms.add("impala", "harness.algorithms.impala:IMPALA", algo.IMPALAConfig)
algorithms.add("sac", "harness.algorithms.sac:SAC", algo.SACConfig)
algorithms.add("dqn", "harness.algorithms.dqn:DQN", algo.DQNConfig)

# Called with (frames, config of the algorithm, options=): see harness/algorithms/objectives.py.
objectives = Registry("objective", "algo.objective")
for name, objective_options in (
    ("behaviour", None),
    ("proximal", None),
    ("decoupled", objective.DecoupledConfig),
    ("ewma", objective.EWMAConfig),
    ("dual_clip", objective.DualClipConfig),
    ("vtrace", objective.VTraceConfig),
    ("truncated_is", objective.TruncatedISConfig),
    ("cispo", objective.CISPOConfig),
    ("m2po", objective.M2POConfig),
    ("dppo", objective.DPPOConfig),
    ("sapo", objective.SAPOConfig),
    ("vcpo", objective.VCPOConfig),
    ("vaco", objective.VACOConfig),
    ("a3po", objective.A3POConfig),
    ("gspo", objective.GSPOConfig),
    ("sequence_is", objective.SequenceISConfig),
    ("geometric", objective.GeometricConfig),
    ("vespo", objective.VESPOConfig),
):
    objectives.add(name, f"harness.algorithms.objectives:{name}", objective_options)

# Made with (options, observation_space): an encoder, see harness/models/encoders.py. One whose
# options derive from MemoryConfig is followed by an LSTM.
models = Registry("model", "model", model.ModelConfig)
models.add("mlp", "harness.models.encoders:MLPEncoder", model.MLPConfig)
models.add("cnn", "harness.models.encoders:CNNEncoder", model.CNNConfig)
models.add("impala_cnn", "harness.models.encoders:ImpalaCNNEncoder", model.ImpalaCNNConfig)
models.add("minatar_cnn", "harness.models.encoders:MinAtarCNNEncoder", model.MinAtarCNNConfig)
models.add("transformer", "harness.models.transformer:TransformerEncoder", model.TransformerConfig)
models.add("lstm", "harness.models.encoders:MLPEncoder", model.LSTMConfig)
models.add("cnn_lstm", "harness.models.encoders:CNNEncoder", model.CNNLSTMConfig)
models.add("impala_cnn_lstm", "harness.models.encoders:ImpalaCNNEncoder", model.ImpalaCNNLSTMConfig)
models.add(
    "minatar_cnn_lstm", "harness.models.encoders:MinAtarCNNEncoder", model.MinAtarCNNLSTMConfig
)

# Made with (env, **arguments); `vector` wraps a native vector of environments.
wrappers = Registry("wrapper", "env.wrappers")
for name, single, vector in (
    ("atari", "AtariPreprocessing", None),
    ("clip_reward", "ClipReward", "ClipReward"),
    ("delay_observation", "DelayObservation", None),
    ("flatten_observation", "FlattenObservation", "FlattenObservation"),
    ("frame_stack", "FrameStackObservation", None),
    ("grayscale", "GrayscaleObservation", "GrayscaleObservation"),
    ("repeat_action", "RepeatAction", None),
    ("rescale_action", "RescaleAction", "RescaleAction"),
    ("rescale_observation", "RescaleObservation", "RescaleObservation"),
    ("resize", "ResizeObservation", "ResizeObservation"),
    ("sticky_action", "StickyAction", None),
    ("time_aware", "TimeAwareObservation", None),
):
    of_vectors = vector and f"gymnasium.wrappers.vector:{vector}"
    wrappers.add(name, f"gymnasium.wrappers:{single}", vector=of_vectors)
wrappers.add("episodic_life", "harness.environments.wrappers:EpisodicLife")
wrappers.add("fire_reset", "harness.environments.wrappers:FireReset")
wrappers.add("one_hot_grid", "harness.environments.wrappers:OneHotGrid")

# Made with options.arguments(): see sync/scheme.py and examples/own_scheme.py.
schemes = Registry("sync scheme", "sync", sync.SyncConfig)
schemes.add("shared_mem", "sync:SharedMemWeightSyncScheme", sync.SharedMemConfig)
schemes.add("multiprocess", "sync:MultiProcessWeightSyncScheme", sync.MultiProcessConfig)
schemes.add("hogwild", "sync:HogwildWeightSyncScheme", sync.HogwildConfig)
schemes.add("none", "sync:NoWeightSyncScheme", sync.NoneConfig)
schemes.add("distributed", "sync:DistributedWeightSyncScheme", sync.DistributedConfig)
schemes.add("rpc", "sync:RPCWeightSyncScheme", sync.RPCConfig)
schemes.add("ray", "sync:RayWeightSyncScheme", sync.RaySyncConfig)

# Made with (env factory, policy, weight_sync_schemes=, seed=, **options.arguments(config)).
collectors = Registry("collector", "collector", collect.CollectorConfig)
collectors.add("single", "collectors:Collector", collect.SingleConfig)
collectors.add("multi_sync", "collectors:MultiSyncCollector", collect.MultiSyncConfig)
collectors.add("multi_async", "collectors:MultiAsyncCollector", collect.MultiAsyncConfig)
collectors.add("simulated", "collectors:SimulatedCollector", simulated.SimulatedConfig)
collectors.add("distributed", "collectors:DistributedCollector", collect.DistributedCollectorConfig)
collectors.add("rpc", "collectors:RPCCollector", collect.RPCCollectorConfig)
collectors.add("ray", "collectors:RayCollector", collect.RayCollectorConfig)

# Made with (options, run_dir, info): a harness.logging.Logger, or None.
loggers = Registry("logger", "logger", log.LoggerConfig, several=True)
loggers.add("jsonl", "harness.logging:no_more_loggers", log.JsonlConfig)
loggers.add("wandb", "harness.logging.wandb:make", log.WandbConfig)
loggers.add("tensorboard", "harness.logging.tensorboard:TensorBoardLogger", log.TensorBoardConfig)
loggers.add("trace", "harness.logging.trace:TraceLogger", log.TraceConfig)

# Made with (options): a harness.run.callbacks.Callback.
callbacks = Registry("callback", "callbacks", Options, several=True)
callbacks.add("events", "harness.logging.events:EventTrace", log.EventsConfig)

GROUPS = (algorithms, collectors, schemes, models, loggers, callbacks)  # groups of the config
