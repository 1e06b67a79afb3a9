"""MkDocs hook: draws the sequence diagrams of the pages as SVG, so that a reader loads no script.

It knows the part of Mermaid's syntax that the pages use: participants, arrows and notes.
"""

from __future__ import annotations

import re
import textwrap
from html import escape
from typing import Any, NamedTuple

FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
ARROW = re.compile(r"(\w+)(-?->>)(\w+): (.+)")
NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")
COLUMN, LINE, TOP = 230, 17, 44  # pixels


class Row(NamedTuple):
    """A message between two columns, or a note over them."""

    first: int
    last: int
    lines: list[str]
    kind: str  # ->>, -->> or note


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return FENCE.sub(lambda found: f"\n{draw(found[1])}\n", markdown)


def draw(source: str) -> str:
    """A sequence diagram as one block of HTML."""
    names, rows = parse(source)
    has_room = all(row.first != row.last or row.last < len(names) - 1 for row in rows)
    width = COLUMN * len(names) + (0 if has_room else COLUMN // 2)
    parts, y = [], TOP + 10
    for row in rows:
        y += LINE * len(row.lines)
        parts += note(row, y) if row.kind == "note" else arrow(row, y)
        y += 20
    for place, name in enumerate(names):
        x = middle(place)
        parts.insert(0, f'<line class="life" x1="{x}" y1="{TOP}" x2="{x}" y2="{y}"/>')
        parts.append(
            f'<rect class="box" x="{x - 110}" y="4" width="220" height="{TOP - 8}" rx="6"/>'
        )
        parts.append(f'<text class="name" x="{x}" y="27">{escape(name)}</text>')
    label = escape(
        f"Sequence diagram: {'; '.join(' '.join(row.lines) for row in rows)}", quote=True
    )
    head = f'<svg viewBox="0 0 {width} {y + 6}" width="{width}" role="img" aria-label="{label}">'
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs>'
    )
    return f'<div class="diagram">{head}{marker}{"".join(parts)}</svg></div>'


def parse(source: str) -> tuple[list[str], list[Row]]:
    """The names of the columns, and the rows; ValueError for a line that is not understood."""
    places: dict[str, int] = {}
    names, rows = [], []
    for line in map(str.strip, source.strip().splitlines()):
        if line == "sequenceDiagram":
            continue
        if found := PARTICIPANT.fullmatch(line):
            places[found[1]] = len(names)
            names.append(found[2])
        elif found := ARROW.fullmatch(line):
            rows.append(Row(places[found[1]], places[found[3]], wrap(found[4]), found[2]))
        elif found := NOTE.fullmatch(line):
            first, last = places[found[1]], places[found[2] or found[1]]
            rows.append(Row(first, last, wrap(found[3], 30 * (1 + last - first)), "note"))
        else:
            raise ValueError(f"a line of a diagram that is not understood: {line!r}")
    return names, rows


def arrow(row: Row, y: int) -> list[str]:
    """From one column to another, or a step within one."""
    x1, x2 = middle(row.first), middle(row.last)
    dashed = " dashed" if row.kind == "-->>" else ""
    if row.first == row.last:
        path = f"M{x1},{y - 12} h18 v12 h-18"
        return [f'<path class="arrow" d="{path}"/>', *text(row.lines, x1 + 26, y - 4, "self")]
    line = f'<path class="arrow{dashed}" d="M{x1},{y} L{x2},{y}"/>'
    return [line, *text(row.lines, (x1 + x2) / 2, y - 6, "said")]


def note(row: Row, y: int) -> list[str]:
    """A box over one or several columns."""
    x1, x2 = middle(row.first) - 108, middle(row.last) + 108
    height = LINE * len(row.lines) + 6
    box = f'<rect class="note" x="{x1}" y="{y - height + 6}" width="{x2 - x1}" height="{height}"/>'
    return [box, *text(row.lines, (x1 + x2) / 2, y - 1, "said")]


def text(lines: list[str], x: float, bottom: int, kind: str) -> list[str]:
    """Lines of text, the last one at `bottom`."""
    top = bottom - LINE * (len(lines) - 1)
    return [
        f'<text class="{kind}" x="{x}" y="{top + LINE * place}">{escape(line)}</text>'
        for place, line in enumerate(lines)
    ]


def wrap(line: str, width: int = 32) -> list[str]:
    """Lines that fit between two columns."""
    return textwrap.wrap(line, width)


def middle(place: int) -> int:
    """Where the line of a column is."""
    return COLUMN * place + COLUMN // 2
