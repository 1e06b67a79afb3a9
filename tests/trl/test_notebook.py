"""The notebook runs from its first cell to its last, with fewer updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: `make trl` makes an environment for it")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path):
    lines = ["import subprocess"]
    for cell in json.loads((ROOT / "examples/trl_lag.ipynb").read_text())["cells"]:
        for line in cell["source"] if cell["cell_type"] == "code" else ():
            if line.startswith("!"):
                command = line[1:].strip().replace("{sys.executable}", sys.executable)
                line = f"subprocess.run({command.split()!r}, check=True)"
            lines.append(line.rstrip())
        lines.append("")
    text = "\n".join(lines)
    for line, shorter in (
        *(("updates=100", "updates=17"), ("batch=128", "batch=32"), ("size=16", "size=4")),
        ("updates=20", "updates=5"),
    ):
        assert line in text
        text = text.replace(line, shorter)
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "the same bits: True" in done.stdout
    assert "sync.lag=16" in done.stdout
