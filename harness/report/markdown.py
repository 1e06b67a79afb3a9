"""The report as Markdown, with its figures beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape

from harness.report.blocks import Block, Bullets, Code, Document, Picture, Table, Text


def render(document: Document, *, figures: str) -> str:
    """The text; `figures` is the folder of the PNG files, relative to it."""
    return "\n".join(_lines(document, figures)).rstrip() + "\n"


def _lines(document: Document, figures: str) -> Iterator[str]:
    yield f"# {plain(document.title)}"
    for section in document.sections:
        yield from ("", f"## {plain(section.title)}", "")
        for block in section.blocks:
            yield from _block(block, figures)
            yield ""


def _block(block: Block, figures: str) -> Iterator[str]:
    match block:
        case Text(text):
            yield plain(text)
        case Bullets(items):
            yield from (f"- {plain(item)}" for item in items)
        case Code(text):
            yield from (f"    {line}" for line in text.splitlines())
        case Table(columns, rows, numbers):
            rule = ["---"] + ["--:" if numbers else "---"] * (len(columns) - 1)
            for cells in (
                [plain(c) for c in columns],
                rule,
                *([plain(c) for c in r] for r in rows),
            ):
                yield f"| {' | '.join(cells)} |"
        case Picture(drawn):
            yield f"![{drawn.slug}]({figures}/{drawn.slug}.png)"
            yield ""
            yield f"*{plain(drawn.caption)}*"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line, whatever it holds."""
    line = " ".join(text.split())
    marked = re.sub(r"([\\`*_\[\]{}|#~!$])", r"\\\1", line)
    marked = escape(marked, quote=False).replace("://", ":\u200b//")  # no link, not even by itself
    return re.sub(r"^(\d*)([-+.)])(?=\s|$)", r"\1\\\2", marked)  # nor a list
