"""`run.py --help`: a manual page made of the files in conf/ and their comments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

CONF = Path(__file__).resolve().parent.parent / "conf"
WIDTH = 96

NAME = "run.py - train a policy, and see what weight synchronisation does to it"

SYNOPSIS = """\
python run.py [group=name ...] [option=value ...]
python run.py --multirun [group=name,name ...] [option=value,value ...]
python run.py resume=RUN_DIRECTORY [option=value ...]"""

DESCRIPTION = """\
Rollout workers step environments with a policy, a learner trains that policy, and a sync scheme
brings its weights to the workers. Every frame says which version of the weights produced it.
What takes each part is chosen from a group; every option can be set by its dotted name. A run
writes to a directory below outputs/, whatever else logs it. Values are written as in YAML: a
list is [a,b], nothing is null. What cannot work is refused at once, in one line."""

EXAMPLES = [
    ("PPO on CartPole, two workers ahead of the learner", ""),
    (
        "the same, the learner and the workers waiting for each other; the weights by message",
        "collector=multi_sync sync=multiprocess",
    ),
    (
        "SAC with committed settings, in another of gymnasium's environments",
        "experiment=sac_pendulum env.id=MountainCarContinuous-v0",
    ),
    ("each worker's policy on a GPU of its own", "collector.devices.policy=[cuda:0,cuda:1]"),
    (
        "a sweep of two schemes and three seeds, without the jobs that are done already",
        "-m sync=shared_mem,hogwild seed=1,2,3 sweep=schemes skip_done=true",
    ),
]

FLAGS = [
    ("-m, --multirun", "a sweep: run every combination of the values given (docs/sweeps.md)"),
    ("-h, --help [GROUP]", "this page, or a group's options"),
    ("--show-config", "print the composed config and start nothing"),
]

STATUS = """\
0 done; 1 failed (traceback in status.json); 2 the config cannot work; 130 ended by Ctrl-C, 143
by SIGTERM, both with a checkpoint. A second Ctrl-C ends at once."""


class UnknownGroup(ValueError):
    """Nobody knows a group of this name."""


def page(topic: str | None = None) -> str:
    """The manual page, or that of one group."""
    if topic is None:
        return "\n".join(_manual())
    topic = topic.split("=")[0]
    names = [group.name for group in groups()]
    if topic not in names:
        raise UnknownGroup(f"--help {topic}: there is no such group; groups: {', '.join(names)}")
    return "\n".join(_group_page(CONF / topic))


def groups() -> list[Path]:
    """The groups in the order in which config.yaml names them."""
    named = re.findall(r"^  - (\w+): ", (CONF / "config.yaml").read_text(), re.MULTILINE)
    return [CONF / name for name in named]


def _manual() -> Iterator[str]:
    yield from ("NAME", f"    {NAME}", "", "SYNOPSIS", textwrap.indent(SYNOPSIS, "    "), "")
    yield from ("DESCRIPTION", textwrap.indent(DESCRIPTION, "    "), "")
    yield "GROUPS (python run.py --help GROUP lists a group's options)"
    defaults = _defaults()
    for group in groups():
        yield f"    {group.name}"
        for file in sorted(group.glob("*.yaml")):
            mark = "*" if defaults.get(group.name) == file.stem else " "
            yield from _entry(f"    {mark} {file.stem}", _summary(file), 31)
    yield "    (* what is taken if nothing is said)"
    yield from ("", "OPTIONS (besides those of the groups)")
    for name, value, comment in _options(CONF / "config.yaml"):
        yield from _entry(f"    {name}={value}" if value else f"    {name}", comment, 37)
    yield from ("", "FLAGS")
    for flag, text in FLAGS:
        yield from _entry(f"    {flag}", text, 27)
    yield from ("", "EXAMPLES")
    for text, arguments in EXAMPLES:
        yield f"    {text}:"
        yield f"        python run.py {arguments}".rstrip()
    yield from ("", "EXIT STATUS", textwrap.indent(STATUS, "    "))


def _group_page(group: Path) -> Iterator[str]:
    for file in sorted(group.glob("*.yaml")):
        yield f"{group.name}={file.stem}"
        yield f"    {_summary(file)}"
        prefix = "" if group.name == "experiment" else f"{group.name}."  # it sets those of others
        for name, value, comment in _options(file):
            yield from _entry(f"    {prefix}{name}={value}", comment, 44)
        yield ""


def _summary(file: Path) -> str:
    first, second = file.read_text().splitlines()[:2]
    return (second if first.startswith("# @") else first).removeprefix("# ")


def _defaults() -> dict[str, str]:
    text = (CONF / "config.yaml").read_text()
    return dict(re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE))


def _options(file: Path) -> Iterator[tuple[str, str, str]]:
    """Name, value and comment of every option line; nested ones by their dotted names."""
    above: list[str] = []
    for line in file.read_text().splitlines():
        match = re.fullmatch(r"( *)(\w+):(?: ([^#]*?))?(?: *# (.*))?", line)
        if match is None:
            continue
        indent, name, value, comment = match.groups(default="")
        above[len(indent) // 2 :] = [name]
        if value and above[0] not in ("defaults", "hydra"):  # without one, those it holds follow
            yield ".".join(above), value, comment


def _entry(left: str, text: str, column: int) -> Iterator[str]:
    """Two columns; what does not fit goes on below."""
    lines = textwrap.wrap(text, WIDTH - column) or [""]
    if len(left) >= column and text:
        yield left
        left = ""
    yield f"{left:<{column}}{lines[0]}".rstrip()
    yield from (" " * column + line for line in lines[1:])
