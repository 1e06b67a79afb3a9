"""The report as Markdown, with its figures beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from harness.analysis.blocks import Block, Code, Document, Picture, Table


def render(document: Document, *, figures: str) -> str:
    """The text; `figures` is the folder of the PNG files, relative to it."""
    return "\n".join(_lines(document, figures)).rstrip() + "\n"


def _lines(document: Document, figures: str) -> Iterator[str]:
    yield f"# {plain(document.title)}"
    for heading, blocks in document.sections.items():
        yield from ("", f"## {plain(heading)}", "")
        for block in blocks:
            yield from _block(block, figures)
            yield ""


def _block(block: Block, figures: str) -> Iterator[str]:
    match block:
        case str():
            yield plain(block)
        case list():
            yield from (f"- {plain(item)}" for item in block)
        case Code(text):
            yield from (f"    {line}" for line in text.splitlines())
        case Table(columns, rows, numbers):
            head, *body = ([plain(cell) for cell in row] for row in (columns, *rows))
            rule = ["---", *["--:" if numbers else "---"] * (len(columns) - 1)]
            yield from (f"| {' | '.join(cells)} |" for cells in (head, rule, *body))
        case Picture(slug=slug, caption=caption):
            yield from (f"![{slug}]({figures}/{slug}.png)", "", f"*{plain(caption)}*")


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line, whatever it holds."""
    line = " ".join(text.split())
    marked = re.sub(r"([\\`*_\[\]{}|#~!$])", r"\\\1", line)
    marked = escape(marked, quote=False).replace("://", ":\u200b//")  # no automatic link
    return re.sub(r"^(\d*)([-+.)])(?=\s|$)", r"\1\\\2", marked)  # no list item
