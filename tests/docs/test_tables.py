"""The tables of two pages: calibration and reference scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.calibration import Row as CalibrationRow
from docs.calibration import table, trained
from docs.reference_scores import ROWS, Row, done_runs, lines, spread
from harness.config.compose import compose_run

pytestmark = pytest.mark.slow


def test_errors_are_relative_to_what_was_measured():
    rows = [
        CalibrationRow("two", "lag, mean", 4.0, 3.9),
        CalibrationRow("two", "frames a second", 10_000.0, 11_000.0),
    ]
    assert table(rows).splitlines()[2:] == [
        "| two | lag, mean | 4.00 | 3.90 | -3% |",
        "| two | frames a second | 10,000 | 11,000 | +10% |",
    ]


def test_a_simulated_run_is_as_fast_as_its_virtual_time_says(tmp_path):
    records = [{"step": 512 * n, "sim/time_s": 0.5 * n} for n in range(1, 9)]
    records.append({"step": 5000, "eval/return": 1.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = trained(tmp_path, {"policy/lag_mean": 3.5, "policy/lag_p95": 4.0})
    assert (found.lag_mean, found.lag_p95, found.fps) == (3.5, 4.0, 1024.0)


def make_run(directory: Path, records: list[dict], **summary: float) -> Path:
    directory.mkdir(parents=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text)
    (directory / "status.json").write_text(json.dumps({"state": "done"}))
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def record(step: int, gained: float, count: int) -> dict:
    return {"step": step, "episode/return": gained, "episode/count": count}


RECORDS = [record(500, 1.0, 10), {"step": 890}, record(910, 4.0, 12), record(1000, 8.0, 18)]


def test_a_score_is_the_mean_over_the_episodes_of_the_last_tenth(tmp_path):
    make_run(tmp_path / "run", RECORDS, frames=1000)
    (found,) = done_runs(tmp_path)["score"]
    assert found == pytest.approx((2 * 4.0 + 6 * 8.0) / 8)


def test_the_table_has_a_line_for_each_row_whether_it_was_run_or_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [Row(name, name.upper(), ("experiment=x",), 2, "5 ± 1") for name in ("done", "none")]
    for seed, gained in ((1, 3.0), (2, 5.0)):
        directory = tmp_path / f"outputs/reference_done/seed={seed}"
        about = {"frames": 1000, "eval/return": gained, "wall_s": 90}
        make_run(directory, [record(1000, gained, 4)], **about)
    _, _, done, none, _, *commands = lines(rows)
    assert done == "| DONE | 1,000 | 2 | 4.0 ± 1.4 | 4.0 ± 1.4 | 5 ± 1 | 1.5 |"
    assert none == "| NONE |  | 0 | not run |  | 5 ± 1 |  |"
    assert commands == ["    python run.py -m experiment=x seed=1,2"] * 2


def test_numbers_have_the_digits_that_they_are_worth():
    assert spread([1290.0, 1310.0]) == "1300 ± 14"
    assert spread([0.5]) == "0.50 ± 0.00"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_a_run_that_can_be_composed(row):
    compose_run(row.overrides)
