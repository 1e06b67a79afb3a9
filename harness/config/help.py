"""`--help`: a manual page generated from the registered parts, conf/ and the options' comments."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_type_hints

import yaml

from harness.config.compose import CONF
from harness.errors import ConfigError, show
from harness.files import flatten
from harness.options.base import Options, comments, defaults, summary
from harness.options.run import CommandConfig, EnvConfig, RunConfig
from harness.registry import GROUPS, Registry, objectives, wrappers

WIDTH = 96
WHOLE = ("experiment", "debug")  # groups of files that set options of the whole run

NAME = "lockstep - train a policy, and see what weight synchronisation does to it"

SYNOPSIS = """\
python run.py [group=name ...] [option=value ...]
python run.py --multirun [group=name,name ...] [option=value,value ...]
python run.py resume=RUN_DIRECTORY [option=value ...]
python run.py report|reproduce|branch|why|calibrate|play|runs|check RUN_DIRECTORY [--help] [...]"""

DESCRIPTION = """\
Rollout workers step environments with a policy, a learner trains that policy, and a sync scheme
sends its weights to the workers. Every frame records which version of the weights produced it.
Choose each part from a group, and set any option by its dotted name. Each run writes to a
directory below outputs/. This is a Hydra application: values are written as in YAML (a list is
[a,b], no value is null), and Hydra's flags and overrides work. A config that cannot work is
refused at once, with one line."""

EXAMPLES = [
    ("PPO on CartPole, two workers ahead of the learner", ""),
    (
        "the same, but learner and workers wait for each other, and weights are sent as messages",
        "collector=multi_sync sync=multiprocess",
    ),
    (
        "SAC with stored settings, in another gymnasium environment",
        "experiment=sac_pendulum env.id=MountainCarContinuous-v0",
    ),
    ("each worker's policy on its own GPU", "collector.devices.policy=[cuda:0,cuda:1]"),
    (
        "a sweep of two schemes and three seeds, skipping jobs that are done",
        "-m sync=shared_mem,hogwild seed=1,2,3 sweep=schemes skip_done=true",
    ),
]

FLAGS = [
    ("-h, --help [GROUP]", "this page, or the options of a group; with plugins=[...] also theirs"),
    ("-m, --multirun", "a sweep: run every combination of the values given (docs/sweeps.md)"),
    (
        "-c, --cfg job|hydra|all",
        "print the composed config and start nothing; also --resolve",
    ),
    ("-i, --info [WHAT]", "how the config was composed: defaults-tree, searchpath, plugins, ..."),
    ("-cd, --config-dir DIR", "a config directory of your own, searched first"),
    ("-cn, --config-name NAME", "a primary config of your own instead of config.yaml"),
    ("-sc, --shell-completion", 'completion: eval "$(python run.py -sc install=bash)"'),
    ("--hydra-help", "all flags of Hydra"),
    ("--version", "the version of Lockstep"),
]

STATUS = """\
0 done; 1 failed (see traceback.txt); 2 the config cannot work; 130 ended by Ctrl-C, 143
by SIGTERM, both with a checkpoint. A second Ctrl-C ends at once."""


def page(topic: str | None = None, user_directory: str | None = None) -> str:
    """The manual page, or that of one group. user_directory: a config directory of the user's."""
    if topic is None:
        called = "lockstep" if Path(sys.argv[0]).name == "lockstep" else "python run.py"
        return "\n".join(_manual()).replace("python run.py", called)
    topic = topic.split("=")[0]
    if topic in (nested := _nested()):
        return "\n".join([summary(nested[topic]), *_options(nested[topic], f"{topic}.", 44)])
    if topic not in groups():
        names = ", ".join([*groups(), *nested])
        raise ConfigError(f"--help {topic}: there is no such group; groups: {names}")
    folders = [CONF] if user_directory is None else [CONF, Path(user_directory)]
    return "\n".join(_group_page(topic, folders))


def _nested() -> dict[str, type[Options]]:
    """The options of every run that are groups: `checkpoint`, `evaluation`."""
    annotations = get_type_hints(RunConfig)
    return {
        name: options
        for name in defaults(RunConfig)
        if isinstance(options := annotations[name], type) and issubclass(options, Options)
    }


def groups(folders: Sequence[Path] = (CONF,)) -> dict[str, dict[str, str]]:
    """Each group with its choices, and a sentence about each of them."""
    by_group = {registry.group: _registered(registry) for registry in GROUPS}
    by_group |= {"env": {"gymnasium": summary(EnvConfig)}, **{group: {} for group in WHOLE}}
    for group, choices in by_group.items():
        for name, file in _files(group, folders).items():
            choices.setdefault(name, _sentence(file))
    order = [name for name in _chosen() if name in by_group]
    return {name: by_group[name] for name in order}


def _registered(registry: Registry) -> dict[str, str]:
    return {part.name: part.summary for part in registry}


def _files(group: str, folders: Sequence[Path]) -> dict[str, Path]:
    """The option files of a group."""
    return {
        file.stem: file for folder in folders for file in sorted((folder / group).glob("*.yaml"))
    }


def _sentence(file: Path) -> str:
    """The first comment of a config file; a user's may have none."""
    comments = [line for line in file.read_text().splitlines() if line.startswith("# ")]
    comments = [line for line in comments if not line.startswith("# @")]
    return comments[0].removeprefix("# ") if comments else ""


def _chosen() -> dict[str, str]:
    """The choice of config.yaml from each group."""
    entries = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {str(group): name for group, name in pairs if not str(group).startswith("override")}


def _manual() -> Iterator[str]:
    yield from ("NAME", f"    {NAME}", "", "SYNOPSIS", textwrap.indent(SYNOPSIS, "    "), "")
    yield from ("DESCRIPTION", textwrap.indent(DESCRIPTION, "    "), "")
    yield "GROUPS (python run.py --help GROUP lists a group's options)"
    chosen = _chosen()
    for group, choices in groups().items():
        yield f"    {group}"
        for name, text in choices.items():
            mark = "*" if chosen.get(group) == name else " "
            yield from _entry(f"    {mark} {name}", text, 31)
    yield "    (* the default)"
    for registry in (wrappers, objectives):
        yield from _entry(f"    {registry.group}", ", ".join(registry.names()), 31)
    yield from ("", "OPTIONS (besides those of the groups)")
    for options in (RunConfig, CommandConfig):
        yield from _options(options, "", 37)
    yield from ("", "FLAGS")
    for flag, text in FLAGS:
        yield from _entry(f"    {flag}", text, 30)
    yield from ("", "EXAMPLES")
    for text, arguments in EXAMPLES:
        yield f"    {text}:"
        yield f"        python run.py {arguments}".rstrip()
    yield from ("", "EXIT STATUS", textwrap.indent(STATUS, "    "))


def _group_page(group: str, folders: Sequence[Path]) -> Iterator[str]:
    registry = next((registry for registry in GROUPS if registry.group == group), None)
    classes = {part.name: part.options for part in registry or ()}
    if group == "env":
        classes = {"gymnasium": EnvConfig}
    files = _files(group, folders)
    for name, text in groups(folders)[group].items():
        yield f"{group}={name}"
        yield f"    {text}".rstrip()
        options = classes.get(name)
        if options is not None:
            prefix = registry.prefix(name) if registry else f"{group}."
            yield from _options(options, prefix, 44)
        else:
            prefix = "" if group in WHOLE else f"{group}."
            for option, value in _set_by(files[name]):
                yield f"    {prefix}{option}={value}"
        yield ""
    if group == "algo":
        yield from _objectives()


def _objectives() -> Iterator[str]:
    """The options that PPO's objectives have of their own."""
    for part in objectives:
        if part.options is not None:
            yield f"algo.objective={{{part.name}: {{...}}}}"
            yield f"    {part.summary}"
            yield from _options(part.options, "", 44)
            yield ""


def _formulas() -> Iterator[str]:
    """What each of PPO's objectives maximises, from the docstrings. It imports torch."""
    module = inspect.getmodule(next(iter(objectives)).load())
    yield (inspect.getdoc(module) or "").rpartition("\n\n")[2]
    for part in objectives:
        text = inspect.getdoc(part.load()) or ""
        yield f"algo.objective={part.name}\n{textwrap.indent(text, '    ')}"


def _options(options: type, prefix: str, column: int) -> Iterator[str]:
    """Each option with its default and its comment; nested ones by their dotted names."""
    texts, annotations = comments(options), get_type_hints(options)
    for name, value in defaults(options).items():
        inner = annotations[name]
        if isinstance(value, dict) and isinstance(inner, type) and hasattr(inner, "group"):
            yield from _options(inner, f"{prefix}{name}.", column)
        else:
            shown = show(value).replace("'", "")
            yield from _entry(f"    {prefix}{name}={shown}", texts.get(name, ""), column)


def _set_by(file: Path) -> Iterator[tuple[str, str]]:
    """The options that a config file sets, by their dotted names."""
    with file.open() as stream:  # errors then name the file
        content = yaml.safe_load(stream)
    content = content if isinstance(content, dict) else {}
    options = {k: v for k, v in content.items() if k not in ("defaults", "hydra")}
    for path, value in flatten(options, lists=False) if options else ():
        yield path, show(value)


def _entry(left: str, text: str, column: int) -> Iterator[str]:
    """Two columns; what does not fit goes on below."""
    lines = textwrap.wrap(text, WIDTH - column) or [""]
    if len(left) >= column and text:
        yield left
        left = ""
    yield f"{left:<{column}}{lines[0]}".rstrip()
    yield from (" " * column + line for line in lines[1:])


def reference() -> str:
    """docs/options.md: every option of every group."""
    command = "python -m harness.config.help > docs/options.md"
    intro = f"# Options\n\nMade by `{command}` from the classes of options in harness/."
    general = [line for options in (RunConfig, CommandConfig) for line in _options(options, "", 37)]
    pages = {"every run": "\n".join(general)} | {group: page(group).rstrip() for group in groups()}
    pages["objectives"] = "\n\n".join(_formulas())
    parts = [f"## {title}\n\n```text\n{text}\n```" for title, text in pages.items() if text]
    return "\n\n".join([intro, *parts])


if __name__ == "__main__":
    print(reference())
