"""Each finding says how to cite it."""

from __future__ import annotations

import importlib.util
import tomllib
from types import SimpleNamespace

from tests.docs.pages import ROOT

HOOK = ROOT / "docs/assets/cite.py"
FINDINGS = sorted((ROOT / "docs/findings").glob("*.md"))


def cited(path: str, text: str) -> str:
    """The page as the site shows it."""
    spec = importlib.util.spec_from_file_location("cite", HOOK)
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri=path))
    return hook.on_page_markdown(text, page=page, config=None, files=None)


def test_a_finding_ends_with_its_bibtex_entry_and_other_pages_stay_as_they_are():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for file in (file for file in FINDINGS if file.stem != "index"):
        text = file.read_text()
        entry = cited(f"findings/{file.name}", text).removeprefix(text)
        title = text.partition("\n")[0].removeprefix("# ")
        assert "## Cite this finding" in entry
        assert f"title = {{{{{title}}}}}" in entry
        assert "year = {2026}" in entry
        assert f"Lockstep {version}, findings/{file.stem}" in entry
        assert entry.count("{") == entry.count("}")
    for path in ("findings/index.md", "sync.md"):
        assert cited(path, "# Title\n") == "# Title\n"
