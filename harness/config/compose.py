"""Composes configs: what Hydra composes from, the plugins that add to it, and one run."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

import harness
from harness.errors import ConfigError
from harness.files import DEEPEST
from harness.options.base import defaults, mappings
from harness.options.collectors import workers_started
from harness.options.run import CommandConfig, EnvConfig, RunConfig
from harness.registry import GROUPS, Part, load_plugins, objectives

HYDRA_VERSION = "1.3"
PROVIDER = "lockstep"
BASES = "options"  # the group of what the files of conf/ build on; other parts have no file
LONGEST_NAME = 120
PATHS = ("resume", "collector.replay")  # options that name a run's directory

_PACKAGE = Path(harness.__file__).parent
# In a checkout conf/ lies beside harness/; an installed package has it inside.
CONF = next(
    p for p in (_PACKAGE.parent / "conf", _PACKAGE / "conf") if (p / "config.yaml").exists()
)


class SearchPath(SearchPathPlugin):
    """Where Hydra looks: in the directory of `--config-dir`, that of the primary config, conf/."""

    user_directory: ClassVar[Path | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.user_directory is not None:
            place = f"file://{self.user_directory.absolute()}"
            search_path.prepend("command-line", place, SearchPathQuery(provider="main"))
        if str(CONF) not in [element.path for element in search_path.get_path()]:
            search_path.append(PROVIDER, f"file://{CONF}")  # the primary config is elsewhere
        search_path.append(PROVIDER, f"{PROVIDER}://")


class Stored(NamedTuple):
    """A config of registered options, and the package that it has if none is named."""

    make: Callable[[], DictConfig]
    package: str | None = None


class RegisteredOptions(ConfigSource):
    """Hydra's source of the options of registered parts.

    Those of a part are read when a config chooses it, since that imports the part.
    """

    configs: ClassVar[dict[str, Stored]] = {}  # by path: group/name

    @staticmethod
    def scheme() -> str:
        return PROVIDER

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        config = self.configs[config_path.removesuffix(".yaml")]
        header = {"package": config.package}
        return ConfigResult(PROVIDER, self.full_path(), config.make(), header)

    def is_config(self, config_path: str) -> bool:
        return config_path.removesuffix(".yaml") in self.configs

    def is_group(self, config_path: str) -> bool:
        folder = f"{config_path.rstrip('/')}/".lstrip("/")
        return any(path.startswith(folder) for path in self.configs)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        folder = f"{config_path.rstrip('/')}/".lstrip("/")
        below = [p.removeprefix(folder) for p in self.configs if p.startswith(folder)]
        names = {ObjectType.CONFIG: {name for name in below if "/" not in name}}
        names[ObjectType.GROUP] = {name.partition("/")[0] for name in below if "/" in name}
        kinds = [results_filter] if results_filter else list(names)
        return sorted({name for kind in kinds for name in names[kind]})


def store_options() -> None:
    """Offer the options of every registered part to Hydra."""
    Plugins.instance().register(SearchPath)
    Plugins.instance().register(RegisteredOptions)
    setup_globals()  # Hydra's resolvers: --experimental-rerun does not register them
    configs = {"run_options": Stored(lambda: _node(RunConfig, **defaults(CommandConfig)))}
    configs["env/gymnasium"] = Stored(lambda: _node(EnvConfig))
    for registry in GROUPS:
        files = {file.stem for file in (CONF / registry.group).glob("*.yaml")}
        for part in registry:
            place = f"{BASES}/{registry.group}" if part.name in files else registry.group
            make = partial(_part_node, part, named=not registry.several)
            package = registry.prefix(part.name).rstrip(".")
            configs[f"{place}/{part.name}"] = Stored(make, package)
    RegisteredOptions.configs = configs


def _part_node(part: Part, *, named: bool) -> DictConfig:
    assert part.options is not None
    return _node(part.options, **({"name": part.name} if named else {}))


def _node(options: type, **changes: Any) -> DictConfig:
    """A config of a dataclass's defaults.

    It is plain, not structured: OmegaConf knows no Literal and no bounds, takes `yes` for true and
    refuses 1e6 as a whole number. harness/options/base.py checks what was composed.
    """
    node = OmegaConf.create({**defaults(options), **changes})
    for name in mappings(options):
        OmegaConf.set_struct(node[name], False)  # keys of the user's own need no plus
    return node


@dataclass(frozen=True)
class Place:
    """Where configs are found."""

    conf: Path = CONF  # the directory of the primary config
    name: str = "config"  # of the primary config
    user_directory: Path | None = None  # searched before `conf`

    def import_plugins(self, overrides: Sequence[str]) -> None:
        """Import the plugins that the command line names."""
        _check_depth(overrides)
        if self.user_directory is not None and not self.user_directory.is_dir():
            raise ConfigError(f"--config-dir {self.user_directory}: there is no such directory")
        load_plugins(dict.fromkeys(named_plugins(overrides)))

    def prepare(self, overrides: Sequence[str]) -> None:
        """Import plugins, and tell Hydra of all options and of the user's directory."""
        self.import_plugins(overrides)
        SearchPath.user_directory = self.user_directory
        store_options()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Where Hydra composes from."""
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(self.conf), version_base=HYDRA_VERSION, job_name="lockstep"):
            yield

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The config of one run, with Hydra's own part."""
        with self.opened():
            return compose(self.name, list(overrides), return_hydra_config=True)


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """The config of one run as the command would compose it."""
    place = Place()
    place.prepare(overrides)
    return place.compose(overrides)


def _check_depth(overrides: Sequence[str]) -> None:
    """Refuse deeply nested values, for which Hydra's parser needs gigabytes of memory."""
    for text in overrides:
        depth = 0
        for character in text:
            depth += (character in "[{(") - (character in ")}]")
            if depth > DEEPEST:
                raise ConfigError(f"{text[:40]}…: brackets are nested more than {DEEPEST} deep")


def task_overrides(hydra_config: Any) -> list[str]:
    """The options on the command line, as typed."""
    overrides = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return [str(text) for text in overrides]


# -- what the command line says before Hydra composes


def named_plugins(overrides: Sequence[str]) -> list[Any]:
    """The modules of `plugins=[...]`: they add options to choose from."""
    plugins = dict(parsed(overrides)).get("plugins") or []
    return plugins if isinstance(plugins, list) else [plugins]


def parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Key and value of each override that can be read; Hydra complains of the others."""
    for text in overrides:
        try:
            (override,) = OverridesParser.create().parse_overrides([text])
        except (HydraException, RecursionError, ValueError):
            continue
        if override.is_delete():
            continue
        if override.is_discrete_sweep() and override.value_type != ValueType.GLOB_CHOICE_SWEEP:
            values = [value.strip("'\"") for value in override.sweep_string_iterator()]
            yield override.key_or_group, values
        else:
            yield override.key_or_group, override.value()


# -- paths of runs on the command line


def quoted(arguments: Sequence[str], *, sweeps: bool = False) -> list[str]:
    """The arguments, with paths of runs in quotes, where Hydra would not read them as one text.

    Job names contain an =. `resume=latest` gets the path of the newest run. sweeps: whether commas
    are between values.
    """
    return [_quoted(text, sweeps=sweeps) for text in arguments]


def _quoted(text: str, *, sweeps: bool) -> str:
    key, _, path = text.partition("=")
    name = key.lstrip("+")
    if name == "resume" and path == "latest":
        path = str(latest_run())
    elif name not in PATHS or _is_read_as_meant(text, sweeps=sweeps):
        return text
    paths = path.split(",") if sweeps else [path]
    return f"{key}={','.join(map(_in_quotes, paths))}"


def _is_read_as_meant(text: str, *, sweeps: bool) -> bool:
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException:
        return False
    return sweeps or not override.is_sweep_override()


def _in_quotes(path: str) -> str:
    """A text as Hydra's grammar quotes it: of backslashes before a quote, each is doubled."""
    escaped = re.sub(r"(\\*)('|$)", lambda end: 2 * end[1] + ("\\'" if end[2] else ""), path)
    return f"'{escaped}'"


def resumed_run(overrides: Sequence[str]) -> Path | None:
    """The directory of the run that the command line resumes; None if it resumes none."""
    path = dict(parsed(overrides)).get("resume")
    return None if path in (None, "") else Path(str(path))


def latest_run() -> Path:
    """The run below outputs/ whose state changed last; `ConfigError` if there is none."""
    states = [
        file
        for file in Path("outputs").rglob("status.json")
        if not any(part.startswith(".") for part in file.parts)  # moved aside
    ]
    if not states:
        raise ConfigError("resume=latest: there is no run below outputs/")
    return max(states, key=lambda file: file.stat().st_mtime_ns).parent


# -- resolvers of conf/


def job_name(override_dirname: str, seed: int) -> str:
    """A job's directory in a sweep: its overrides and its seed, fit for a file name.

    The seed has its place in the order, so that the name is the same however it was given.
    """
    parts = [part for part in override_dirname.split(",") if part]
    typed_seed = f"seed={seed}"
    place = next(
        (i for i, part in enumerate(parts) if "=" in part and part > typed_seed), len(parts)
    )
    parts.insert(place, typed_seed)
    return file_name(",".join(part.lstrip("+") for part in parts))


def file_name(text: str) -> str:
    """`text` as part of one file's name."""
    name = re.sub(r"[^\w.=,+-]", "_", text)
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


def zipped(*values: Any, _root_: DictConfig) -> Any:
    """The value at the index that the option `point` gives."""
    point = _root_.get("point")
    if type(point) is not int or not 0 <= point < len(values):
        expected = f"expected 0 to {len(values) - 1}, as ${{zip:...}} has {len(values)} values"
        raise ConfigError(f"point={point}: {expected}")
    return values[point]


def needs_vtrace(objective: Any) -> bool:
    """Whether an objective, as a config names it, is none without V-trace."""
    name = objective if isinstance(objective, str) else next(iter(objective or ()), None)
    return name in objectives and getattr(objectives.get(name).options, "needs_vtrace", False)


OmegaConf.register_new_resolver("zip", zipped, replace=True)
OmegaConf.register_new_resolver("lockstep.vtrace", needs_vtrace, replace=True)
OmegaConf.register_new_resolver("lockstep.product", lambda *n: math.prod(n), replace=True)
OmegaConf.register_new_resolver("lockstep.job_name", job_name, replace=True)
OmegaConf.register_new_resolver("lockstep.file_name", file_name, replace=True)
OmegaConf.register_new_resolver("lockstep.workers", workers_started, replace=True)
