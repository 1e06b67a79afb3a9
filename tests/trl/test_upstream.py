"""The scripts for TRL's authors show what their texts say; another worker's run is recorded."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: `make trl` makes an environment for it")

from lockstep_check.check import check
from lockstep_trl import RunRecord

UPSTREAM = Path(__file__).resolve().parents[2] / "docs/upstream"


def table(output: str) -> list[list[float]]:
    rows = output[output.index("update  version of the samples") :].splitlines()[1:]
    return [[float(number) for number in row.split()] for row in rows]


def test_the_age_that_trl_logs_is_one_update_too_low(capsys):
    runpy.run_path(str(UPSTREAM / "trl_staleness.py"), run_name="__main__")
    first, *rest = table(capsys.readouterr().out)
    assert first == [0, 1, 1, 0, 0, 0]
    assert rest == [[u, u, u + 1, 1, 0, 0] for u in range(1, 6)]


def test_false_log_probabilities_end_in_the_same_weights(capsys):
    runpy.run_path(str(UPSTREAM / "trl_rollout_func.py"), run_name="__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if "final weights:" in line]
    true, false = (line.split("final weights:")[1].split() for line in lines)
    assert true == false
    assert true[1:] == ["clipped:", "0.0"]


def test_the_run_of_another_worker_is_recorded_as_it_is(tmp_path):
    """TRL's own worker needs vLLM; this one has the same protocol and runs in this process."""
    make_trainer = runpy.run_path(str(UPSTREAM / "trl_staleness.py"))["make_trainer"]
    trainer = make_trainer(tmp_path / "model", updates=5)
    RunRecord(tmp_path / "run", trace=True).attach(trainer)
    trainer.train()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["policy/lag_mean"] for line in lines] == [0, 1, 1, 1, 1]
    assert [json.loads(line)["trl/staleness_mean"] for line in lines] == [0] * 5
    result = check(tmp_path / "run/events.jsonl")
    assert [finding.rule.__name__ for finding in result.broken] == ["ReportedAge"]
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "done"
