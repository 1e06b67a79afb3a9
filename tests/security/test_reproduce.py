"""What a run directory holds cannot mislead `harness.reproduce` into code or tracebacks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness import reproduce
from harness.files import write_json
from harness.run.checkpoints import CheckpointError, Checkpoints
from harness.run_comparison import weights
from harness.run_directory import return_of
from tests.harness.report.synthetic import make_run


@pytest.mark.parametrize("value", ["x", [], {}, None, True, 10**400, float("inf")], ids=str)
def test_a_strange_score_is_no_traceback(value):
    assert math.isnan(found := return_of({"eval/return": value})) or found >= 1


@pytest.mark.parametrize("name", ["manifest.json", "status.json", "config.yaml"])
@pytest.mark.parametrize(
    "content", ["[1]", "{", '{"state": 3, "packages": 3, "git": [], "env": 1}']
)
def test_a_damaged_run_is_refused_in_one_line(tmp_path, capsys, name, content):
    run = make_run(tmp_path / "run")
    (run / name).write_text(content)
    assert reproduce.main([str(run), "--out", str(tmp_path / "again")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert not (tmp_path / "again").exists()


def test_another_runs_weights_are_not_compared(tmp_path: Path):
    Checkpoints(tmp_path / "checkpoints", run="bbbb").save(1, {"learner": {}})
    write_json(tmp_path / "manifest.json", json.loads('{"wandb_id": "aaaa"}'))
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        weights(tmp_path)
