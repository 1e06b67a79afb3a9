"""Registries of everything that a config can name: algorithms, models, schemes, and so on.

    from harness.registry import algorithms

    @algorithms.register("reinforce", options=ReinforceConfig)
    class Reinforce: ...

makes `algo=reinforce` an algorithm, with the fields of ReinforceConfig as its options. The module
must be imported before the config is composed, since it adds options to choose from, and again in
every worker. A person names modules on the command line (`plugins=[my_package.my_module]`) or in
the environment (`LOCKSTEP_PLUGINS=my_package.my_module`); modules in the current directory are
found, too. An installed package declares them by the entry-point group `lockstep.plugins`. A run
directory's stored plugins are imported only if a person names them again.

Lockstep's own parts are registered in the same way, in the files of harness/algorithms, models,
environments and logging: a file that is added to these folders needs no other change. Collectors,
schemes and gymnasium's wrappers, whose packages know no registry, are listed below.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from harness.errors import ConfigError, nearest, suggest
from harness.options.base import Options, summary
from harness.options.collectors import CollectorConfig
from harness.options.run import AlgorithmConfig, LoggerConfig, ModelConfig
from harness.options.sync import SyncConfig

HARNESS = Path(__file__).parent
ENTRY_POINTS = "lockstep.plugins"
VARIABLE = "LOCKSTEP_PLUGINS"  # modules, with commas between them

Made = TypeVar("Made", bound=Callable[..., Any])


@dataclass(frozen=True)
class Part:
    """One thing that a config can name.

    Classes and functions may be given as "module:attribute", which is imported when it is used.
    """

    name: str
    target: Any  # a class or function
    options_class: Any = None  # a dataclass; None: it has no options
    vector: Any = None  # wrappers: what wraps a native vector of environments
    sentence: str = ""  # what it is, where that is known without an import

    def load(self) -> Any:
        """The class or function."""
        return load(self.target)

    @property
    def options(self) -> type | None:
        """The dataclass of its options."""
        options: type | None = load(self.options_class)
        return options

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        of_options = self.sentence or ("" if self.options is None else summary(self.options))
        return of_options or summary(self.load())


@dataclass
class Registry:
    """Parts of one kind by name."""

    kind: str  # in messages: "algorithm"
    group: str  # where its name is given: "algo"
    base: type | None = None  # the class that the parts' options derive from
    folder: str = ""  # of harness/, whose files register Lockstep's own parts
    several: bool = False  # whether a config may choose several, each with options below its name
    first: tuple[str, ...] = ()  # names that are listed first, in this order
    elsewhere: Sequence[Part] = ()  # parts of packages that know no registry

    @cached_property
    def _parts(self) -> dict[str, Part]:
        parts = {part.name: part for part in self.elsewhere}
        for module, code in code_of(self.folder) if self.folder else ():
            parts |= {part.name: part for part in self._registered(code, module)}
        order = [name for name in self.first if name in parts]
        return {name: parts[name] for name in order} | parts

    def _registered(self, code: ast.Module, module: str) -> Iterator[Part]:
        """What the code has decorated with `register`, a method of this registry."""
        targets = [x for x in code.body if isinstance(x, ast.ClassDef | ast.FunctionDef)]
        sentences = {x.name: (ast.get_docstring(x) or "").partition("\n")[0] for x in targets}
        for target in targets:
            for decorator in reversed(target.decorator_list):
                match decorator:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id=registry), attr="register"),
                        args=[ast.Constant(value=str(name))],
                    ) if globals().get(registry) is self:
                        arguments = {str(x.arg): ast.unparse(x.value) for x in decorator.keywords}
                        options, vector = (
                            f"{module}:{arguments[key]}" if key in arguments else None
                            for key in ("options", "vector")
                        )
                        sentence = (
                            sentences.get(arguments.get("options", "")) or sentences[target.name]
                        )
                        yield Part(name, f"{module}:{target.name}", options, vector, sentence)

    def register(
        self, name: str, *, options: type | None = None, vector: Any = None
    ) -> Callable[[Made], Made]:
        """Class or function decorator: make it known under a name."""

        def add(target: Made) -> Made:
            self.add(name, target, options, vector=vector)
            return target

        return add

    def add(self, name: str, target: Any, options: Any = None, *, vector: Any = None) -> None:
        """Make `target` known under a name. It and its options may be "module:attribute"."""
        if not isinstance(options, str | None):
            self._check(name, options)
        registered = self._parts.get(name)
        if registered is not None and path(registered.target) != path(target):
            raise ValueError(
                f"{self.kind} {name!r} is registered already: {path(registered.target)}"
            )
        self._parts[name] = Part(name, target, options, vector)

    def _check(self, name: str, options: Any) -> None:
        if not (isinstance(options, type) and is_dataclass(options)):
            raise TypeError(f"{self.kind} {name!r}: options is {options!r}, expected a dataclass")
        if self.base is not None and not issubclass(options, self.base):
            raise TypeError(
                f"{self.kind} {name!r}: its options must derive from {self.base.__name__}, "
                f"got {options!r}"
            )

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


@cache
def code_of(folder: str) -> list[tuple[str, ast.Module]]:
    """The modules of a folder that may register parts, with their code.

    They are not imported before a config chooses one: torch alone takes seconds to load.
    """
    files = [(file, file.read_text()) for file in sorted((HARNESS / folder).glob("*.py"))]
    return [
        (f"harness.{folder}.{file.stem}".removesuffix(".__init__"), ast.parse(text, str(file)))
        for file, text in files
        if "\n@" in text and ".register(" in text
    ]


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


# -- plugins


def load_plugins(modules: Iterable[str]) -> None:
    """Import installed plugins, those of the environment, and these; `ConfigError` if one fails."""
    _load_installed()
    for module in filter(None, os.environ.get(VARIABLE, "").split(",")):
        _load(module.strip(), f"{VARIABLE}={module}")
    for module in modules:
        _load(module, f"plugins=[{module}]")


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


def _load(module: str, place: str) -> None:
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
            f"{place} cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error


# -- the kinds of parts, with Lockstep's own

# Made with (options, setup): see harness/algorithms/interface.py.
algorithms = Registry(
    "algorithm", "algo", AlgorithmConfig, "algorithms", first=("ppo", "grpo", "impala", "sac")
)

# Called with (frames, config of the algorithm, options=): see harness/algorithms/objectives.py.
objectives = Registry("objective", "algo.objective", folder="algorithms")

# Made with (options, observation_space): an encoder, see harness/models/encoders.py. One whose
# options derive from MemoryConfig is followed by an LSTM.
models = Registry(
    "model",
    "model",
    ModelConfig,
    "models",
    first=("mlp", "cnn", "impala_cnn", "minatar_cnn", "transformer", "lstm"),
)

# Made with (env, **arguments); `vector` wraps a native vector of environments.
wrappers = Registry(
    "wrapper",
    "env.wrappers",
    folder="environments",
    elsewhere=[
        Part(
            name,
            f"gymnasium.wrappers:{single}",
            vector=vector and f"gymnasium.wrappers.vector:{vector}",
        )
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
        )
    ],
)

# Made with options.arguments(): see sync/scheme.py and examples/own_scheme.py.
schemes = Registry(
    "sync scheme",
    "sync",
    SyncConfig,
    elsewhere=[
        Part(name, f"sync:{scheme}WeightSyncScheme", f"harness.options.sync:{options}")
        for name, scheme, options in (
            ("shared_mem", "SharedMem", "SharedMemConfig"),
            ("multiprocess", "MultiProcess", "MultiProcessConfig"),
            ("hogwild", "Hogwild", "HogwildConfig"),
            ("none", "No", "NoneConfig"),
            ("distributed", "Distributed", "DistributedConfig"),
            ("rpc", "RPC", "RPCConfig"),
            ("ray", "Ray", "RaySyncConfig"),
        )
    ],
)

# Made with (env factory, policy, weight_sync_schemes=, seed=, **options.arguments(config)).
collectors = Registry(
    "collector",
    "collector",
    CollectorConfig,
    elsewhere=[
        Part(name, f"collectors:{collector}", f"harness.options.{options}")
        for name, collector, options in (
            ("single", "Collector", "collectors:SingleConfig"),
            ("multi_sync", "MultiSyncCollector", "collectors:MultiSyncConfig"),
            ("multi_async", "MultiAsyncCollector", "collectors:MultiAsyncConfig"),
            ("simulated", "SimulatedCollector", "simulated:SimulatedConfig"),
            ("distributed", "DistributedCollector", "collectors:DistributedCollectorConfig"),
            ("rpc", "RPCCollector", "collectors:RPCCollectorConfig"),
            ("ray", "RayCollector", "collectors:RayCollectorConfig"),
        )
    ],
)

# Made with (options, run_dir, info): a harness.logging.Logger, or None.
loggers = Registry(
    "logger", "logger", LoggerConfig, "logging", several=True, first=("jsonl", "wandb")
)

# Made with (options): a harness.callbacks.Callback.
callbacks = Registry("callback", "callbacks", Options, "logging", several=True)

GROUPS = (algorithms, collectors, schemes, models, loggers, callbacks)  # groups of the config
