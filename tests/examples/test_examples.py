"""The examples run, as they are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "start_method",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "fork")), "forkserver"],
)
def test_two_workers_take_every_version_of_a_lone_scheme(start_method):
    output = run("standalone_sync.py", start_method)
    for worker in (0, 1):
        for version in range(1, 6):
            assert f"worker {worker}, version {version}:" in output


def test_two_workers_collect_and_no_frame_is_lost():
    output = run("collect.py")
    counts = output.splitlines()[-1]
    assert "'delivered': 4000" in counts
    assert "'dropped': 0" in counts


def test_a_whole_scheme_of_ones_own_takes_less_than_120_lines():
    assert len((EXAMPLES / "own_scheme.py").read_text().splitlines()) < 120


def test_the_standalone_example_fits_on_a_page():
    assert len((EXAMPLES / "standalone_sync.py").read_text().splitlines()) < 40


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    """With fewer frames, as a script: what follows `!` is a command."""
    notebook = json.loads((EXAMPLES / "first_ablation.ipynb").read_text())
    lines = ["import subprocess"]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("15_000", "4_096").replace("\\\n", "")
            for line in source.splitlines():
                command = f"subprocess.run({line[1:]!r}, shell=True, check=True)"
                line = line.replace("%pip", "raise SystemExit  # %pip")  # it is installed here
                lines.append(command if line.startswith("!") else line)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "outputs/first_ablation: 8 done" in done.stdout
    assert "| setting | verdict | difference | newest weights |" in done.stdout
    assert "identical: all metrics but times" in done.stdout


def test_the_notebooks_first_cell_of_code_installs():
    notebook = json.loads((EXAMPLES / "first_ablation.ipynb").read_text())
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    name = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["name"]
    assert f"%pip install -q {name}" in "".join(first["source"])


def test_the_notebook_shows_what_it_gave():
    notebook = json.loads((EXAMPLES / "first_ablation.ipynb").read_text())
    shown = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in shown)
    assert "identical: all metrics" in "".join("".join(out.get("text", [])) for out in shown)
