"""The report as one HTML page that needs nothing but itself: no script, no request, no font."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape

from harness.analysis.blocks import Block, Code, Document, Picture, Table

# No script runs and nothing is fetched, whatever a run directory holds.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --line: #d9d9d9;
  --soft: #5c5c5c; --shade: #f6f7f8; --link: #0060a8; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; }
a { color: var(--link); }
p, ul { max-width: 46rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
td.text { overflow-wrap: anywhere; min-width: 6rem; }
td.text:first-child { overflow-wrap: break-word; }
thead th { color: var(--soft); font-weight: 600; }
.number { text-align: right; white-space: nowrap; }
figure { margin: 1.5rem 0; }
figure img { display: block; width: 100%; max-width: 37rem; height: auto; }
figcaption { max-width: 46rem; margin-top: .5rem; color: var(--soft); font-size: .875rem; }
pre { padding: .75rem; background: var(--shade); font-size: .8125rem; white-space: pre-wrap; }
.dark { display: none !important; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181c; --line: #3c4048; --soft: #a9adb5; --shade: #1f2228;
    --link: #7db8f0; }
  .light { display: none !important; }
  .dark { display: block !important; }
}
@page { margin: 1.5cm; }
@media print {
  figure img { width: auto; max-width: min(100%, 15cm); max-height: 21cm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .table { overflow: visible; }
  .number { white-space: normal; }
}
"""


def render(document: Document) -> str:
    """The page."""
    return "\n".join(_page(document)) + "\n"


def _page(document: Document) -> Iterator[str]:
    title = escape(document.title)
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
    yield f"<title>{title}</title><style>{STYLE}</style></head><body>"
    yield f"<h1>{title}</h1><nav><ul>"
    for place, heading in enumerate(document.sections):
        yield f'<li><a href="#s{place}">{escape(heading)}</a></li>'
    yield "</ul></nav><main>"
    for place, (heading, blocks) in enumerate(document.sections.items()):
        yield f'<section><h2 id="s{place}">{escape(heading)}</h2>'
        for block in blocks:
            yield from _block(block)
        yield "</section>"
    yield "</main></body></html>"


def _block(block: Block) -> Iterator[str]:
    match block:
        case str():
            yield f"<p>{escape(block)}</p>"
        case list():
            yield "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in block) + "</ul>"
        case Code(text):
            yield f"<pre>{escape(text)}</pre>"
        case Table():
            yield from _table(block)
        case Picture():
            yield from _figure(block)


def _table(table: Table) -> Iterator[str]:
    kinds = ["text"] + ["number" if table.numbers else "text"] * (len(table.columns) - 1)
    # With a tab index a table that is too wide can be scrolled by keyboard.
    yield '<div class="table" tabindex="0"><table><thead><tr>'
    for kind, column in zip(kinds, table.columns, strict=True):
        yield f'<th scope="col" class="{kind}">{escape(column)}</th>'
    yield "</tr></thead><tbody>"
    for row in table.rows:
        cells = zip(kinds, row, strict=True)
        yield (
            "<tr>" + "".join(f'<td class="{k}">{escape(cell)}</td>' for k, cell in cells) + "</tr>"
        )
    yield "</tbody></table></div>"


def _figure(picture: Picture) -> Iterator[str]:
    alt = escape(picture.alt, quote=True)
    yield "<figure>"
    for theme, svg in (("light", picture.svg), ("dark", picture.svg_dark)):
        data = base64.b64encode(svg.encode()).decode()
        yield f'<img class="{theme}" alt="{alt}" src="data:image/svg+xml;base64,{data}">'
    yield f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
