"""The pages that people read, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("docs/options.md",)
# A command begins a line, or comes after a prompt or what sets its environment.
COMMAND = re.compile(r"(?:^|(?<=\s))(python run\.py|run\.py|python -m [\w.]+|lockstep)(?=\s|$)")
SUBSTITUTION = re.compile(r"\$\((python .*?)\)")
INLINE = re.compile(r"`((?:python (?:run\.py|-m harness)|lockstep )[^`]*)`")


class Command(NamedTuple):
    """A command of a page: the program, its arguments, and the error that the page shows."""

    page: str
    program: str  # run.py, or a module
    arguments: list[str]
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.page}: {self.program} {shlex.join(self.arguments)}"


def pages() -> list[str]:
    """All Markdown pages for readers, by their paths."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in [*found, ROOT / "outputs/README.md"])


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text()


def commands() -> list[Command]:
    """All commands of all pages that call Lockstep."""
    found = [command for page in pages() if page not in GENERATED for command in of_page(page)]
    return list({str(command): command for command in found}.values())


def of_page(page: str) -> Iterator[Command]:
    """The commands of one page, in code blocks and in the text."""
    text = read(page)
    for block in code_blocks(text):
        lines = re.sub(r" *\\\n *", " ", block).splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            error = after if after.startswith("lockstep: ") else None
            if not line.startswith("lockstep: "):
                yield from parse(page, line.removeprefix("$ "), error)
    for found in INLINE.finditer(re.sub(r"^( {4}|```).*?$", "", text, flags=re.MULTILINE)):
        for command in parse(page, " ".join(found[1].split())):
            if command.arguments:  # else it is a name
                yield command


def parse(page: str, line: str, error: str | None = None) -> Iterator[Command]:
    """The command in a line, if there is one that calls Lockstep."""
    for inner in SUBSTITUTION.findall(line):
        yield from parse(page, inner)
    line = SUBSTITUTION.sub("", line)
    if not (found := COMMAND.search(line)) or line.lstrip().startswith(("#", "!")):
        return
    program = {"lockstep": "run.py", "python run.py": "run.py"}.get(found[1], found[1])
    rest = line[found.end() :].replace("<run directory>", "RUN").split(" > ")[0].rstrip("'")
    rest = rest + "'" if rest.count("'") % 2 else rest
    arguments = [text for text in shlex.split(rest, comments=True) if text != "..."]
    yield Command(page, program.removeprefix("python -m "), arguments, error)


def code_blocks(text: str) -> Iterator[str]:
    """Fenced blocks, and blocks that are indented."""
    fences = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    for found in fences.finditer(text):
        if found[1] not in ("python", "yaml", "mermaid"):
            yield found[2]
    outside = fences.sub("\n", text)
    for found in re.finditer(r"(?:^ {4}.*\n(?:\s*\n(?= {4}))?)+", outside, re.MULTILINE):
        yield re.sub(r"^ +", "", found[0], flags=re.MULTILINE)
