"""What a report is made of; `html` and `markdown` put it into their forms.

Blocks hold plain text: whoever renders them escapes all of it, whatever it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.report.figures import Drawn


@dataclass
class Text:
    """A paragraph."""

    text: str


@dataclass
class Bullets:
    """A list of sentences."""

    items: list[str]


@dataclass
class Code:
    """Lines to be typed, or read as they are."""

    text: str


@dataclass
class Table:
    """Rows of text; from the second column on they are numbers if `numbers`."""

    columns: list[str]
    rows: list[list[str]]
    numbers: bool = True


@dataclass
class Picture:
    """A figure, drawn already."""

    drawn: Drawn


Block = Text | Bullets | Code | Table | Picture


@dataclass
class Section:
    """A heading and what is below it."""

    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Document:
    """The whole report."""

    title: str
    sections: list[Section]

    def pictures(self) -> list[Drawn]:
        """Every figure, in order."""
        blocks = [block for section in self.sections for block in section.blocks]
        return [block.drawn for block in blocks if isinstance(block, Picture)]
