"""The table of environments is made by trying them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "environment_kinds.py"


def rows(only: str) -> list[list[str]]:
    """The cells of the rows that the command prints."""
    command = [sys.executable, str(SCRIPT), "--only", only]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines()]


def test_an_environment_that_works_says_what_was_checked():
    head, _, found = rows("FrozenLake")
    assert len(head) == len(found)
    assert found[:4] == ["plain", "FrozenLake-v1", "Discrete(16)", "Discrete(4)"]
    assert found[4].startswith("300, ")
    assert found[5:8] == ["yes", "yes", "yes"]


def test_an_environment_that_is_refused_shows_the_error():
    (*_, refused) = rows("Dict actions")
    assert refused[4].startswith("refused: TypeError: Dict action spaces are not supported")
