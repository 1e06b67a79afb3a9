"""`make` installs with uv where it is on the PATH, and with pip elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIP = ".venv/bin/python -m pip"
TOOLS = ("make", "sh", "awk", "printf")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH with what the Makefile needs, and without uv."""
    for tool in TOOLS:
        if (place := shutil.which(tool)) is None:
            pytest.skip(f"needs {tool}")
        (tmp_path / tool).symlink_to(place)
    (tmp_path / "python3").symlink_to(sys.executable)
    return tmp_path


def printed(path: Path, *arguments: str) -> str:
    """The commands of `make` in a checkout that has no environment yet."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock", ".python-version"):
        if not (path / name).exists():
            shutil.copy(ROOT / name, path)
    ended = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=path,
        env=os.environ | {"PATH": str(path), "MAKEFLAGS": ""},  # these tests may run in `make`
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("target", ["run", "test"])
def test_pip_installs_what_is_locked_where_there_is_no_uv(target, path):
    commands = printed(path, target)
    assert f"{PIP} install -c requirements.lock --no-build-isolation" in commands
    assert "uv pip" not in commands


@pytest.mark.parametrize("target", ["run", "test"])
def test_uv_installs_what_is_locked_where_it_is_on_the_path(target, path):
    (path / "uv").write_text("#!/bin/sh\n")
    (path / "uv").chmod(0o755)
    commands = printed(path, target)
    installs = [line for line in commands.splitlines() if line.startswith(f"{path}/uv pip install")]
    assert len(installs) == 2
    assert all("--python .venv/bin/python -c requirements.lock " in line for line in installs)
    assert PIP not in commands
    # What follows is the same.
    program = ".venv/bin/python " + ("run.py experiment" if target == "run" else "-m pytest")
    assert program in commands


@pytest.mark.parametrize("choice", ["PYTHON=python3", "UV="])
def test_a_named_interpreter_and_an_empty_variable_choose_pip(choice, path):
    (path / "uv").write_text("#!/bin/sh\n")
    (path / "uv").chmod(0o755)
    commands = printed(path, "run", choice)
    assert "uv pip" not in commands
    assert PIP in commands
