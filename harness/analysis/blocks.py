"""What a report is made of; `html` and `markdown` render it.

A block is a paragraph (`str`), a list of sentences (`list[str]`), `Code`, a `Table` or a `Picture`.
Blocks hold plain text from untrusted files: the renderers escape all of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Code:
    """Lines that are shown as they are."""

    text: str


@dataclass
class Table:
    """Rows of text; with `numbers`, all columns but the first hold numbers."""

    columns: list[str]
    rows: list[list[str]]
    numbers: bool = False


@dataclass
class Picture:
    """A figure in all the forms that a report needs."""

    slug: str
    caption: str
    alt: str
    png: bytes
    svg: str
    svg_dark: str


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
