"""From the command line to one plain mapping: hydra's composition with errors in one line."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config.errors import ConfigError, suggest
from harness.config.remote import hosts_started

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
HYDRA_VERSION = "1.3"
LONGEST_NAME = 120

# Used in config.yaml, for the directories of runs and of a sweep's jobs.
OmegaConf.register_new_resolver("lockstep.job_name", lambda text: job_name(text), replace=True)
OmegaConf.register_new_resolver("lockstep.hosts", lambda few: hosts_started(few), replace=True)
OmegaConf.register_new_resolver("lockstep.file_name", lambda text: file_name(text), replace=True)
OmegaConf.register_new_resolver("zip", lambda *values, _root_: zipped(values, _root_), replace=True)
# What is in the environment (keys, tokens) is no config file's business: configs are stored, logged
# and sent. On the command line the shell does it: name=$HOSTNAME.
OmegaConf.clear_resolver("oc.env")

# Whose classes hydra may be told to make; all else a config could run.
HYDRAS_OWN = ("hydra._internal.core_plugins.", "hydra_plugins.")
# What hydra and its parsers raise for texts that they were not made for.
UNFIT = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


def compose_job(overrides: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """The resolved options of one run, and the directory it would write to."""
    composed = _compose(forced(overrides))
    try:
        directory = _directory("hydra.run.dir", composed.hydra.run.dir)
        with_hydra = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(with_hydra, dict)
        del with_hydra["hydra"]
        options = OmegaConf.to_container(OmegaConf.create(with_hydra), resolve=True)
    except ConfigError:
        raise
    except UNFIT as error:
        raise ConfigError(_first_line(error)) from None
    assert isinstance(options, dict)
    return {str(key): value for key, value in options.items()}, directory


def expand_sweep(overrides: Sequence[str]) -> list[list[str]] | None:
    """The overrides of each job of a sweep; None if only its sweeper knows what it will try."""
    sweeper = sweeper_options(overrides)
    if not str(sweeper["_target_"]).endswith("BasicSweeper"):
        return None
    from_config = [f"{key}={value}" for key, value in (sweeper["params"] or {}).items()]
    by_key = {o.get_key_element().lstrip("+"): o for o in parse([*from_config, *overrides])}
    columns = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_discrete_sweep()
        else [o.input_line or ""]
        for o in by_key.values()
    ]
    return [list(job) for job in itertools.product(*columns)]


def sweeper_options(overrides: Sequence[str]) -> dict[Any, Any]:
    """The options of hydra's sweeper, as they stand in the config."""
    options = OmegaConf.to_container(_compose(forced(_fixed(overrides))).hydra.sweeper)
    assert isinstance(options, dict)
    return options


def plugin_choices(overrides: Sequence[str]) -> dict[str, str]:
    """The launcher and the sweeper, whoever chose them: the command line or an experiment."""
    choices = _compose(forced(_fixed(overrides))).hydra.runtime.choices
    return {group: str(choices[group]) for group in ("hydra/launcher", "hydra/sweeper")}


def sweep_dir(overrides: Sequence[str]) -> Path:
    """Where the jobs of a sweep write."""
    try:
        return _directory("hydra.sweep.dir", _compose(forced(_fixed(overrides))).hydra.sweep.dir)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from None


def _directory(name: str, value: Any) -> Path:
    if not isinstance(value, str) or not Path(value).name:
        raise ConfigError(f"{name}={value!r}: expected the path of a directory")
    return Path(value)


def fixed_keys(overrides: Sequence[str]) -> list[str]:
    """What is given one value for all jobs of a sweep."""
    return [o.key_or_group for o in parse(overrides) if not o.is_sweep_override()]


def _fixed(overrides: Sequence[str]) -> list[str]:
    return [o.input_line for o in parse(overrides) if not o.is_sweep_override() and o.input_line]


def job_name(override_dirname: str) -> str:
    """A job's directory in a sweep: its overrides, fit for a file name and not too long."""
    parts = [part.lstrip("+") for part in override_dirname.split(",") if part]
    return file_name(",".join(parts)) or "job"


def zipped(values: Sequence[Any], root: DictConfig) -> Any:
    """The value at the index that the option `point` gives."""
    point = root.get("point")
    if type(point) is not int or not 0 <= point < len(values):
        expected = f"expected 0 to {len(values) - 1}, as ${{zip:...}} has {len(values)} values"
        raise ConfigError(f"point={point}: {expected}")
    return values[point]


def file_name(text: str) -> str:
    """`text` as part of one file's name."""
    name = re.sub(r"[^\w.=,+-]", "_", text)
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides as hydra understands them, each one's key known to be sound."""
    parsed = []
    for text in overrides:
        if text.startswith("="):
            raise ConfigError(f"{text!r} names no option: write option=value")
        if text.startswith("-"):
            raise ConfigError(f"{text}: there is no such flag; see --help")
        try:
            parsed += OverridesParser.create().parse_overrides([text])
        except (HydraException, RecursionError, ValueError):
            raise ConfigError(
                f"{text!r} is no override: write option=value, group=name or group.option=value"
                + "; other signs than plain letters go in quotes within quotes, \"name='é 1%'\""
                * ("=" in text)
            ) from None
    for override in parsed:
        _check_group(override)
    return parsed


def forced(overrides: Sequence[str]) -> list[str]:
    """The overrides of one run, each setting its option even where no config file names it.

    Hydra's own complaint about an unknown key knows neither our options nor their types. What is
    unknown is found afterwards, by name.
    """
    for override in parse(overrides):
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line} names several values, a sweep: start it with --multirun; "
                f"a list is written {override.key_or_group}=[...]"
            )
    return forced_in_sweep(overrides)


def forced_in_sweep(overrides: Sequence[str]) -> list[str]:
    """The same of a sweep, whose overrides may name several values."""
    return [
        f"++{override.input_line}" if _sets_an_option(override) else override.input_line or ""
        for override in parse(overrides)
    ]


def _sets_an_option(override: Override) -> bool:
    plain = not (override.is_add() or override.is_force_add() or override.is_delete())
    return plain and not _is_group(override) and not override.is_hydra_override()


def _is_group(override: Override) -> bool:
    key = override.key_or_group
    return "/" in key or key in groups()


def groups() -> dict[str, list[str]]:
    """Each group of conf/ with the names of its options."""
    folders = sorted(p for p in CONF.iterdir() if p.is_dir() and p.name != "hydra")
    return {folder.name: sorted(f.stem for f in folder.glob("*.yaml")) for folder in folders}


def _check_group(override: Override) -> None:
    key = override.key_or_group
    if key.startswith("hydra") or key not in groups() or override.is_delete():
        return
    names = groups()[key]
    value = override.value()
    wanted = [str(v) for v in value.list] if override.is_choice_sweep() else [value]  # type: ignore[union-attr]
    if isinstance(value, dict):
        raise ConfigError(f"{override.input_line}: {key} is a group; set one option, {key}.x=...")
    if not isinstance(value, str | list) and not override.is_sweep_override():
        raise ConfigError(f"{override.input_line}: expected one of {', '.join(names)}")
    for name in wanted:
        if isinstance(name, str) and name not in names:
            hint = suggest(name, names, prefix=f"{key}=")
            known = "" if "known" in hint else f" ({', '.join(names)})"
            raise ConfigError(f"{key}={name}: there is no such {key}; {hint}{known}")


def _compose(overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    _keep_own_plugins()
    try:
        with initialize_config_dir(str(CONF), version_base=HYDRA_VERSION, job_name="run"):
            composed = compose("config", overrides, return_hydra_config=True)
            _check_targets(OmegaConf.to_container(composed.hydra, resolve=False))
            return composed
    except ConfigError:
        raise
    except UNFIT as error:
        raise ConfigError(_first_line(error)) from None


def _check_targets(value: Any) -> None:
    """Raise if hydra is told to make anything but what is its own."""
    if isinstance(value, dict):
        target = value.get("_target_", HYDRAS_OWN[0])
        if not str(target).startswith(HYDRAS_OWN):
            raise ConfigError(
                f"_target_={target}: a config names no code; hydra's own may be named"
            )
        for item in value.values():
            _check_targets(item)
    elif isinstance(value, list):
        for item in value:
            _check_targets(item)


def _keep_own_plugins() -> None:
    """Let files in conf/hydra/ say alone what they say, though another plugin has their name."""
    Plugins.instance()  # which finds all plugins, and so their options
    stored = ConfigStore.instance().repo.get("hydra", {})
    for file in (CONF / "hydra").glob("*/*.yaml"):
        stored.get(file.parent.name, {}).pop(file.name, None)


def _first_line(error: BaseException) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    key = getattr(error, "full_key", None)
    line = line.removeprefix("ConfigError raised while resolving interpolation: ")
    return f"{key}: {line}" if key else line
