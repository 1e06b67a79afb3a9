"""MkDocs hook: ends the page of each finding with how to cite it, from CITATION.cff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CITATION = Path(__file__).resolve().parents[2] / "CITATION.cff"
BLOCK = """

## Cite this finding

```bibtex
@misc{{lockstep-{name},
  title = {{{{{title}}}}},
  author = {{{{{author}}}}},
  year = {{{year}}},
  howpublished = {{Documentation of Lockstep {version}, {path}}}
}}
```
"""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    path = page.file.src_uri
    if not path.startswith("findings/") or path.endswith("index.md"):
        return markdown
    return markdown + block(path, title=markdown.partition("\n")[0].removeprefix("# "))


def block(path: str, title: str) -> str:
    """The section of one finding."""
    citation = yaml.safe_load(CITATION.read_text())
    return BLOCK.format(
        name=Path(path).stem.replace("_", "-"),
        title=title,
        author=citation["authors"][0]["name"],
        year=citation["date-released"][:4],
        version=citation["version"],
        path=path.removesuffix(".md"),
    )
