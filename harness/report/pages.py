"""What a report is made of, and its pages: HTML and Markdown, by a template each.

A block is a paragraph (`str`), a list of sentences (`list[str]`), `Code`, a `Table` or a `Picture`.
Blocks hold plain text from untrusted files: the templates escape all of it.
"""

from __future__ import annotations

import base64
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.report.text import printable


@dataclass
class Code:
    """Lines that are shown as they are."""

    text: str


@dataclass
class Table:
    """Rows of text; with `numbers`, all columns but the first `texts` hold numbers."""

    columns: list[str]
    rows: list[list[str]]
    numbers: bool = False
    texts: int = 1

    @property
    def kinds(self) -> list[str]:
        """Of each column, `text` or `number`."""
        return [
            "number" if self.numbers and place >= self.texts else "text"
            for place in range(len(self.columns))
        ]


@dataclass
class Picture:
    """A figure in all the forms that a report needs."""

    slug: str
    caption: str
    alt: str
    png: bytes
    svg: str
    svg_dark: str
    narrow: str  # an SVG for phones
    narrow_dark: str


MOST_ROWS, MOST_ITEMS = 24, 12  # of a table and of a list on a terminal

Block = str | list[str] | Code | Table | Picture


@dataclass
class Document:
    """The whole report."""

    title: str
    sections: dict[str, list[Block]]  # by heading

    def pictures(self) -> list[Picture]:
        """Every figure, in order."""
        blocks = [block for section in self.sections.values() for block in section]
        return [block for block in blocks if isinstance(block, Picture)]


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line, whatever it holds."""
    line = " ".join(text.split())
    marked = re.sub(r"([\\`*_\[\]{}|#~!$])", r"\\\1", line)
    marked = escape(marked, quote=False).replace("://", ":\u200b//")  # no automatic link
    return re.sub(r"^(\d*)([-+.)])(?=\s|$)", r"\1\\\2", marked)  # no list item


def is_a(block: Any, kind: str) -> bool:
    """Whether a block is of the kind of this name."""
    return type(block).__name__ == kind


PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name is not None and name.startswith("page.html"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
PAGES.filters |= {"plain": plain, "base64": lambda text: base64.b64encode(text.encode()).decode()}
PAGES.tests["a"] = is_a


def to_html(document: Document) -> str:
    """One page with everything in it."""
    page = PAGES.get_template("page.html.jinja")
    return _writable(page.render(title=document.title, sections=document.sections))


def to_markdown(document: Document, *, figures: str) -> str:
    """The text; `figures` is the folder of the PNG files, relative to it."""
    page = PAGES.get_template("report.md.jinja")
    text = page.render(title=document.title, sections=document.sections, figures=figures)
    return _writable(text)


def to_text(blocks: Sequence[Block], width: int = 80, most_rows: int | None = MOST_ROWS) -> str:
    """Paragraphs, lists and tables for a terminal; tables may be wider than `width`."""
    return "\n\n".join(_block_as_text(block, width, most_rows) for block in blocks)


def _block_as_text(block: Block, width: int, most_rows: int | None) -> str:
    if isinstance(block, str):
        return textwrap.fill(printable(block), width)
    if isinstance(block, Table):
        return "\n".join(_table_as_text(block, most_rows))
    if isinstance(block, list):
        more = len(block) - MOST_ITEMS
        rest = [f"and {more} more, in the report"] if more > 0 else []
        wrap = partial(textwrap.fill, width=width, initial_indent="- ", subsequent_indent="  ")
        return "\n".join(wrap(printable(item)) for item in [*block[:MOST_ITEMS], *rest])
    raise TypeError(f"{type(block).__name__} is not for a terminal")


def _table_as_text(table: Table, most_rows: int | None) -> Iterator[str]:
    most = len(table.rows) if most_rows is None else most_rows
    rows = [[printable(cell) for cell in row] for row in [table.columns, *table.rows]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows[: most + 1]:
        cells = [
            cell.rjust(size) if kind == "number" else cell.ljust(size)
            for cell, size, kind in zip(row, widths, table.kinds, strict=True)
        ]
        yield "  ".join(cells).rstrip()
    if (more := len(table.rows) - most) > 0:
        yield f"and {more} more, in the report"


def _writable(text: str) -> str:
    """Settings and names may hold what UTF-8 cannot; it is shown as a question mark."""
    return text.encode(errors="replace").decode()
