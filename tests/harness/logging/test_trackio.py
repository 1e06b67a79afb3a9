"""A run logged to Trackio, offline, and read back with Trackio. Needs the extra trackio."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.config.plan import plan_run
from harness.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
MISSING = importlib.util.find_spec("trackio") is None


@pytest.mark.skipif(MISSING, reason="pip install -e '.[trackio]'")
def test_a_run_is_in_the_local_store_with_its_config_and_every_record(tmp_path):
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "store")}
    options = ["total_frames=1024", "collector=single", "sync=none", "evaluation.at_end=false"]
    options += ["collector.frames_per_batch=256", "log_every_frames=256", "logger=trackio"]
    command = [sys.executable, str(ROOT / "run.py"), *options, f"hydra.run.dir={tmp_path / 'run'}"]
    said = subprocess.run(
        command, check=True, env=environment, timeout=200, capture_output=True, text=True
    )
    assert "Trackio" not in said.stdout  # which would break the dashboard
    stored = query(environment, "get", "run", "--project", "lockstep", "--run", "run")
    assert stored["config"]["algo"]["name"] == "ppo"
    metric = ["--project", "lockstep", "--run", "run", "--metric", "policy/lag_mean"]
    values = query(environment, "get", "metric", *metric)["values"]
    records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    wanted = [one["step"] for one in records if "policy/lag_mean" in one]
    assert [value["step"] for value in values] == wanted == [256, 512, 768, 1024]


def query(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """What Trackio's own command prints."""
    command = [sys.executable, "-m", "trackio.cli", *arguments, "--json"]
    return json.loads(subprocess.check_output(command, env=environment, timeout=100))


@pytest.mark.skipif(not MISSING, reason="trackio is installed")
def test_without_the_package_one_line_says_how_to_get_it():
    with pytest.raises(ConfigError, match=r"pip install -e '.\[trackio\]'"):
        plan_run(["logger=trackio"])
