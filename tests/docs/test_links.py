"""Links between pages lead somewhere. `make docs` checks those within docs/ more strictly."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, pages, read

LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[\s-]+", "-", heading) for heading in kept}


def test_links_lead_to_files_and_headings_that_exist():
    missing = []
    for page in pages():
        for link in LINK.findall(read(page)):
            path, _, anchor = link.partition("#")
            if "://" in path:
                continue
            target = (ROOT / page).parent / path if path else ROOT / page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                missing.append(f"{page}: {link}")
    assert missing == []
