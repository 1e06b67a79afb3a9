"""Pages and docstrings use the field's words, and none of version 1's private vocabulary.

Words that computing uses as well (line, turn, member, room) are not looked for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT, pages, read

PACKAGES = ("sync", "collectors", "harness", "hydra_plugins", "examples", "benchmarks")
PRIVATE = re.compile(
    r"\b(crews?|seats?|fleets?|parcels?|intakes?|doz(?:e|es|ing)|mend(?:s|ed|ing)?|attends?)\b"
    r"|\b(?:held|let_in)\(\)"
    r"|gone on with|by himself|one does not have|what comes before anything|is it\b(?=[.:;])"
    r"|cost of a send grows|search was at",
    re.IGNORECASE,
)


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of the packages, with its place."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    name = getattr(node, "name", "the module")
                    yield f"{file.relative_to(ROOT)}: {name}", ast.get_docstring(node) or ""


@pytest.mark.parametrize("page", pages())
def test_a_page_has_no_private_words(page):
    assert [found[0] for found in PRIVATE.finditer(read(page))] == []


def test_docstrings_have_no_private_words():
    found = {place: PRIVATE.search(text) for place, text in docstrings()}
    assert {place: match[0] for place, match in found.items() if match} == {}


@pytest.mark.parametrize("text", ["The crew is mended.", "a run is not gone on with", "let_in()"])
def test_private_words_are_found(text):
    assert PRIVATE.search(text)


@pytest.mark.parametrize("text", ["It recommends two seeds.", "a member of the group", "in turn"])
def test_ordinary_words_are_not(text):
    assert not PRIVATE.search(text)
