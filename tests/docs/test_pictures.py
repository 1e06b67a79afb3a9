"""The tool that draws the pictures of docs/logging.md."""

from __future__ import annotations

import html
import runpy
from pathlib import Path

import pytest

import run
from tests.docs.pages import ROOT
from tests.harness.small import SMALL

pytestmark = pytest.mark.slow
draw = runpy.run_path(str(ROOT / "docs/assets/pictures.py"))["main"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    """The directory of a run with two workers."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = ("collector=multi_async", "collector.num_workers=2", "total_frames=2048")
    assert run.main([*SMALL, *options, "logger=trace", f"hydra.run.dir={folder}"]) == 0
    return folder


def test_a_picture_is_made_of_a_recorded_run(traced, tmp_path):
    out = tmp_path / "dashboard.svg"
    draw(["dashboard", str(traced), str(out), "--at", "0.5"])
    svg = out.read_text()
    assert svg.startswith("<svg")
    assert "url(http" not in svg
    assert "frames/s" in svg.replace("&#160;", " ")
    assert "worker" in svg


def test_a_picture_is_made_of_a_trace(traced, tmp_path):
    out = tmp_path / "timeline.svg"
    draw(["timeline", str(traced), str(out), "--seconds", "1000"])
    svg = out.read_text()
    assert svg.startswith("<?xml")
    for said in ("learner", "worker 0", "worker 1", "update", "a worker's batch"):
        assert said in html.unescape(svg)
