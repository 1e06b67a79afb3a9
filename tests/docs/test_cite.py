"""Each finding says how to cite it."""

from __future__ import annotations

import importlib.util
import tomllib
from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize("file", [f for f in FINDINGS if f.stem != "index"], ids=lambda f: f.stem)
def test_a_finding_ends_with_its_bibtex_entry(file):
    text = file.read_text()
    entry = cited(f"findings/{file.name}", text).removeprefix(text)
    title = text.partition("\n")[0].removeprefix("# ")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert "## Cite this finding" in entry
    assert f"title = {{{{{title}}}}}" in entry
    assert "year = {2026}" in entry
    assert f"Lockstep {version}, findings/{file.stem}" in entry
    assert entry.count("{") == entry.count("}")


@pytest.mark.parametrize("path", ["findings/index.md", "sync.md"])
def test_other_pages_stay_as_they_are(path):
    assert cited(path, "# Title\n") == "# Title\n"
