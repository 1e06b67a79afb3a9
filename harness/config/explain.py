"""Turns errors of Hydra and OmegaConf into one line with the nearest correct alternative."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hydra.core.config_store import ConfigStore
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from harness import COMMANDS
from harness.config.compose import BASES, CONF
from harness.errors import ConfigError, install_command, nearest, show, suggest
from harness.files import parse_yaml
from harness.options.base import GONE, GONE_VALUES, UnknownOption, join, paths
from harness.options.run import CommandConfig, EnvConfig, RunConfig
from harness.registry import GROUPS

# What Hydra and its parsers raise for a config or a command line that they cannot read.
UNFIT = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


@contextmanager
def explained(overrides: Sequence[str]) -> Iterator[None]:
    """Whatever composing a config raises, as a `ConfigError`."""
    try:
        yield
    except UnknownOption as error:
        if error.path == "" and (chosen := _chosen_file(error, overrides)):
            raise ConfigError(
                f"{chosen}: the first line of its file must be '# @package _global_', which makes "
                f"its options those of the whole run; now they are options of {error.key!r}"
            ) from None
        what = where(error.path, error.key, error.names)
        raise ConfigError(f"{join(error.path, error.key)}={show(error.value)}: {what}") from None
    except ConfigError:
        raise
    except UNFIT as error:
        raise ConfigError(explain(error, overrides)) from error


def _chosen_file(error: UnknownOption, overrides: Sequence[str]) -> str:
    """The config file, as it was chosen, whose options ended up under its group's name; or empty.

    Only groups of whole experiments are meant: an option of this name does not exist.
    """
    if not isinstance(error.value, Mapping):
        return ""
    chosen = [
        text.lstrip("+") for text in overrides if text.lstrip("+").startswith(f"{error.key}=")
    ]
    if chosen and "{" not in chosen[-1]:
        return chosen[-1]
    return error.key if error.key == "experiment" and not chosen else ""


def explain(error: BaseException, overrides: Sequence[str]) -> str:
    """What is wrong, in one line."""
    for text in overrides:
        if text.startswith(("=", "-")):
            return _no_override(text)
    match error:
        case OverrideParseException():
            return _no_override(str(error.override))
        case MissingConfigException() if error.options is not None:
            return _no_choice(str(error.missing_cfg_file), error.options)
        case ConfigCompositionException() if isinstance(
            error.__cause__, ConfigAttributeError | ConfigKeyError
        ):
            return _no_option(str(error.__cause__.full_key), overrides)
        case MarkedYAMLError():
            return _no_yaml(error)
        case RecursionError():
            return (
                "a config's defaults list leads back to the config itself: name another file of "
                "its group without the group, `- ppo_cartpole` in place of "
                "`- /experiment: ppo_cartpole`"
            )
    if "Could not override" in str(error) and "@experiment." in str(error):
        return f"{_first_line(error)} Its first line must be '# @package _global_'"
    if "--multirun" in str(error):
        if any("interval(" in text for text in overrides):
            return f"{_first_line(error)}, and hydra/sweeper=optuna, which draws from an interval"
        return f"{_first_line(error)}: a sweep needs --multirun, a list is written option=[a,b]"
    return _first_line(error)


def _no_override(text: str) -> str:
    if text.startswith("="):
        return f"{text!r} names no option: write option=value"
    if text.startswith("-"):
        return f"{text}: there is no such flag; see --help"
    if (near := nearest(text, COMMANDS)) is not None and "=" not in text:
        return f"{text!r} is no command; did you mean {near}?"
    quotes = "; other signs than plain letters go in quotes within quotes, \"name='é 1%'\""
    return f"{text!r} is no override: write option=value, group=name or group.option=value" + (
        quotes if "=" in text else f"; the commands are {', '.join(COMMANDS)}"
    )


def _no_yaml(error: MarkedYAMLError) -> str:
    mark, problem = error.problem_mark, error.problem or "no YAML"
    place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    hint = "; a value that holds ': ' goes in quotes" if "mapping values" in problem else ""
    return f"{place}{problem}{hint}"


def _no_choice(missing: str, options: Sequence[str]) -> str:
    if missing.startswith("hydra/launcher/submitit"):
        return (
            f"hydra/launcher={missing.rpartition('/')[2]} needs hydra-submitit-launcher; "
            f"install it with: {install_command('sweep')}"
        )
    group, _, name = missing.rpartition("/")
    if (group, name) in GONE_VALUES:
        return f"{group}={name}: there is no such {group}; {GONE_VALUES[group, name]}"
    if not group:
        return f"--config-name {name}: there is no such config; {suggest(name, options)}"
    hint = suggest(name, options, prefix=f"{group}=")
    names = "" if "known" in hint else f" (known: {', '.join(sorted(options))})"
    elsewhere = "; one of your own needs --config-dir" if group == "experiment" else ""
    if group.removeprefix(f"{BASES}/") in [registry.group for registry in GROUPS]:
        elsewhere = " (yours? plugins=[module])"
    return f"{group}={name}: there is no such {group}; {hint}{names}{elsewhere}"


def _no_option(key: str, overrides: Sequence[str]) -> str:
    """What to say of an option that is not in the config."""
    if key.startswith("hydra."):
        group, _, option = key.removeprefix("hydra.").partition(".")
        if parts := _hydra_parts(group, option):
            return f"{key}: the chosen {group} has no such option; it is one of " + ", ".join(parts)
        return f"{key}: Hydra has no such option; +{key}=... adds it"
    for text in overrides:
        option, _, value = text.partition("=")
        if option == key or option.startswith(f"{key}."):
            path, _, last = option.rpartition(".")
            return f"{option}={value}: {where(path, last, chosen=_chosen(path, overrides))}"
        if value.startswith("{") and key.startswith(f"{option}."):
            return f"{text}: {option} is a group; set one option, {option}.x=..."
    path, _, last = key.rpartition(".")
    return f"{key}: {where(path, last)}"


def _hydra_parts(group: str, option: str) -> list[str]:
    """The launchers or the sweepers that have an option, as they are chosen."""
    store = ConfigStore.instance()
    nodes = {
        name.removesuffix(".yaml"): store.load(f"hydra/{group}/{name}").node
        for name in (store.list(f"hydra/{group}") if group in ("launcher", "sweeper") else [])
    }
    for file in (CONF / "hydra" / group).glob("*.yaml"):
        nodes[file.stem] = parse_yaml(file.read_text())
    return [f"hydra/{group}={name}" for name, node in sorted(nodes.items()) if option in node]


def where(path: str, key: str, names: Sequence[str] = (), *, chosen: str = "") -> str:
    """Where an unknown option is: in other parts of the group, elsewhere, or under another name.

    names: of the options beside it. chosen: the part that does not have it.
    """
    options = known_options()
    full = f"{path}.{key}" if path else key
    if full in GONE:
        return f"there is no such option; {GONE[full]}"
    if full in options:
        return f"{chosen or 'the chosen part'} has no such option; it is one of " + ", ".join(
            options[full]
        )
    if "." in path and path in options:
        return f"{path} is a single option; write {path}={{{key}: ...}}"
    elsewhere = [option for option in options if option.rpartition(".")[2] == key]
    if elsewhere:
        return f"there is no such option; did you mean {' or '.join(elsewhere)}?"
    if not names:
        below = [o.removeprefix(f"{path}.") for o in options if o.startswith(f"{path}.")]
        names = [*dict.fromkeys(o.partition(".")[0] for o in (below or options))]
    hint = suggest(key, names, prefix=f"{path}." if path else "")
    return f"there is no such option; {hint}"


def _chosen(path: str, overrides: Sequence[str]) -> str:
    """What the command line chooses from the group that an option lies in; empty if nothing."""
    group = path.partition(".")[0]
    named = [text for text in overrides if text.startswith(f"{group}=")]
    return named[-1] if named else ""


def known_options() -> dict[str, list[str]]:
    """The dotted path of every option that there is, and the parts that have it."""
    places: dict[str, list[str]] = {}

    def add(options: type, prefix: str, part: str) -> None:
        for path in paths(options):
            places.setdefault(f"{prefix}{path}", []).append(part)

    add(RunConfig, "", "every run")
    add(CommandConfig, "", "the command")
    add(EnvConfig, "env.", "every environment")
    for registry in GROUPS:
        for part in registry:
            assert part.options is not None
            add(part.options, registry.prefix(part.name), f"{registry.group}={part.name}")
        places.setdefault(registry.group, []).append("every run")
    places |= {group: ["every run"] for group in ("env", "experiment", "debug")}
    return places


def _first_line(error: BaseException) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    key = getattr(error, "full_key", None)
    line = line.removeprefix("ConfigError raised while resolving interpolation: ")
    return f"{key}: {line}" if key else line
