"""Names: of packages, where a module of another project is in the way, and of classes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sync", "collectors", "harness", "hydra_plugins", "lockstep_check")
PACKAGES += ("lockstep_conformance", "lockstep_trl")


def error_of(module: str, *, first: Path) -> str:
    """The last line of the error of importing a module with this folder first on `sys.path`."""
    path = os.pathsep.join([str(first), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=first,
        capture_output=True,
        text=True,
        timeout=110,
    )
    return ended.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("module", "other"),
    [("harness", "sync"), ("harness", "collectors"), ("collectors", "sync")],
)
def test_another_module_of_our_name_is_an_error_that_says_where_it_is(module, other, tmp_path):
    (tmp_path / f"{other}.py").write_text("")
    error = error_of(module, first=tmp_path)
    assert error.startswith("ImportError: ")
    assert f"`import {other}` leads to {tmp_path / other}.py" in error


def test_a_folder_of_our_name_without_python_files_is_in_nobodys_way(tmp_path):
    (tmp_path / "sync").mkdir()
    assert error_of("harness, collectors", first=tmp_path) == ""


def test_a_class_name_occurs_once_in_all_packages():
    places: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert twice == {}
