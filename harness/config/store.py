"""What Hydra composes from: the registered options as configs, and the resolvers of conf/."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

import harness
from harness.options.base import defaults, mappings
from harness.options.collectors import nodes_started
from harness.options.environments import EnvConfig
from harness.options.errors import ConfigError
from harness.options.run import CommandConfig, RunConfig
from harness.registry import GROUPS

HYDRA_VERSION = "1.3"
PROVIDER = "lockstep"
BASES = "options"  # the group of what the files of conf/ build on; other parts have no file
LONGEST_NAME = 120

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


def store_options() -> None:
    """Put the options of every registered part into Hydra's ConfigStore."""
    Plugins.instance().register(SearchPath)
    setup_globals()  # Hydra's resolvers: --experimental-rerun does not register them
    store = ConfigStore.instance()
    run = {**defaults(RunConfig), **defaults(CommandConfig)}
    store.store(name="run_options", node=run, provider=PROVIDER)
    store.store(name="gymnasium", group="env", node=_node(EnvConfig), provider=PROVIDER)
    for registry in GROUPS:
        for part in registry:
            assert part.options is not None
            named = {} if registry.several else {"name": part.name}
            node, package = _node(part.options, **named), registry.prefix(part.name).rstrip(".")
            has_file = (CONF / registry.group / f"{part.name}.yaml").is_file()
            group = f"{BASES}/{registry.group}" if has_file else registry.group
            store.store(part.name, node, group, package, PROVIDER)


def _node(options: type, **given: Any) -> DictConfig:
    """A config of a dataclass's defaults.

    It is plain, not structured: OmegaConf knows no Literal and no bounds, takes `yes` for true and
    refuses 1e6 as a whole number. harness/options/typed.py checks what was composed.
    """
    node = OmegaConf.create({**defaults(options), **given})
    for name in mappings(options):
        OmegaConf.set_struct(node[name], False)  # keys of the user's own need no plus
    return node


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


OmegaConf.register_new_resolver("zip", zipped, replace=True)
OmegaConf.register_new_resolver("lockstep.product", lambda *n: math.prod(n), replace=True)
OmegaConf.register_new_resolver("lockstep.job_name", job_name, replace=True)
OmegaConf.register_new_resolver("lockstep.file_name", file_name, replace=True)
OmegaConf.register_new_resolver("lockstep.nodes", nodes_started, replace=True)
