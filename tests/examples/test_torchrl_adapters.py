"""The adapters for TorchRL, in the peers' environment: its tensordict is older than the lock's."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
CASES = Path(__file__).with_name("torchrl_cases.py")
NAMES = [
    node.name
    for node in ast.parse(CASES.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]

pytestmark = pytest.mark.timeout(300)  # the first test runs all cases in one process


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """The traceback of each case, or nothing if it passed."""
    python = Path(sys.executable) if find_spec("torchrl") else PEERS
    if not python.exists():
        pytest.skip("TorchRL is not installed here, and there is no .venv-peers: see `make peers`")
    ran = subprocess.run(
        [python, "-m", "tests.examples.torchrl_cases"],
        cwd=ROOT,
        env=os.environ | {"RL_WARNINGS": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_torchrl(results, name):
    assert results[name] == "", results[name]
