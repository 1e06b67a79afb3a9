"""`lockstep runs`, and the same runs as DataFrames."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from harness import runs
from tests.harness.report.synthetic import make_run
from tests.harness.small import ROOT


def test_the_list_has_the_state_frames_return_and_age_of_each_run(tmp_path, capsys):
    done = make_run(tmp_path / "done", seed=1, frames=12_000)
    summary = json.loads((done / "summary.json").read_text())
    (done / "summary.json").write_text(json.dumps(summary | {"eval/return": 98.5}))
    manifest = json.loads((done / "manifest.json").read_text())
    started = datetime.now(UTC) - timedelta(hours=2, minutes=5)
    manifest["started"] = started.isoformat(timespec="seconds")
    (done / "manifest.json").write_text(json.dumps(manifest))
    running = make_run(tmp_path / "running", seed=2, state="running")
    (running / "metrics.jsonl").write_text('{"step": 300, "episode/return": 7.25}\n')
    (tmp_path / "lost").mkdir()
    assert runs.main([str(tmp_path)]) == 0
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["run", "state", "frames", "return", "started"]
    name = tmp_path.name
    assert lines[0] == [f"{name}/done", "done", "12,000", "98.5", "2", "h", "ago"]
    assert lines[1] == [f"{name}/lost", "unknown", "–", "–", "–"]
    assert lines[2][:4] == [f"{name}/running", "running", "300", "7.25"]


def test_every_run_is_in_the_list(tmp_path, capsys):
    for seed in range(40):
        make_run(tmp_path / f"run{seed}", seed=seed, frames=200)
    assert runs.main([str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 41


def test_a_place_without_runs_is_one_line(tmp_path, capsys):
    assert runs.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("runs: no run in ")
    assert error.count("\n") == 1


def test_runs_and_their_records_are_two_tables(tmp_path):
    for lag in (0, 16):
        for seed in (1, 2):
            make_run(tmp_path / f"{lag}-{seed}", seed=seed, sync={"name": "a", "lag": lag})
    table, records = runs.read(tmp_path)
    assert list(table["seed"]) == [1, 2, 1, 2]
    assert list(table["sync.lag"]) == [0, 0, 16, 16]
    assert table["summary.eval/return"].notna().all()
    assert set(records["run"]) == set(table.index)
    assert {"step", "episode/return", "sync/publish_ms", "policy/lag_mean"} <= {*records}
    joined = records.join(table[["sync.lag", "seed"]], on="run")
    assert joined.groupby(["sync.lag", "seed"])["episode/return"].count().tolist() == [20] * 4


def test_one_run_may_be_read_as_well(tmp_path):
    directory = make_run(tmp_path / "run", seed=3)
    table, records = runs.read(str(directory))
    assert table.loc[0, "name"] == "run"
    expected = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert records["policy/lag_mean"].tolist() == pytest.approx(
        [record["policy/lag_mean"] for record in expected]
    )


def test_a_list_may_be_cut_by_head(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"run{seed}", seed=seed, frames=200)
    list_runs = f"{sys.executable} -m harness.runs {tmp_path}"
    # The pipe is closed before anything is written to it.
    piped = f"set -o pipefail; {list_runs} | true"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
