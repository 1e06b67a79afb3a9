"""The examples run, as they are shown."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
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
