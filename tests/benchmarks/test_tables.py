"""The tables of `benchmarks/`: calibration, pairing, predictors and reference scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import pairing, predictors
from benchmarks.calibration import Row as CalibrationRow
from benchmarks.calibration import table, trained
from benchmarks.predictors import Point, damages
from benchmarks.reference_scores import ROWS, Row, done_runs, lines, spread
from harness.config.compose import compose_run

pytestmark = pytest.mark.slow
FRESH = (0.0, 0.0, 0.0)


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


def test_the_table_compares_paired_with_unpaired_deviations():
    """The schedules move both scores by the same amount, and each objective adds a little."""
    found = {
        "behaviour": {1: 10.0, 2: 20.0, 3: 30.0},
        "decoupled": {3: 42.0, 2: 30.0, 1: 21.0},
    }
    *_, row, median = pairing.lines(found)
    assert row == "| behaviour, decoupled | 3 | 1.0 | 14.5 | 7% | 100% |"
    assert median == "| median | | | | 7% | 100% |"


def test_too_few_seeds_in_common_are_an_error():
    found = {"behaviour": {1: 10.0, 2: 20.0, 3: 30.0}, "decoupled": {1: 1.0, 2: 2.0, 4: 3.0}}
    with pytest.raises(ValueError, match="behaviour and decoupled have 2 seeds in common"):
        list(pairing.lines(found))


def test_damage_is_the_share_of_the_tasks_largest_loss():
    found = [
        Point("a", "x", 0, 100, FRESH),
        Point("a", "x", 8, 60, (8, 0.1, 0.1)),
        Point("a", "y", 0, 90, FRESH),
        Point("a", "y", 8, 10, (8, 0.2, 0.1)),
        Point("b", "x", 0, 5, FRESH),
        Point("b", "x", 8, 4, (8, 0.1, 0.1)),
    ]
    assert damages(found) == [0, 0.5, 0, 1, 0, 1]


def test_the_table_has_the_rank_correlation_of_damage_with_each_measure():
    found = [
        Point("a", "x", 0, 100, FRESH),
        Point("a", "x", 1, 90, (1, 0.3, 0.1)),
        Point("a", "x", 2, 80, (2, 0.2, 0.2)),
        Point("a", "x", 4, 70, (4, 0.1, 0.4)),
    ]
    assert list(predictors.lines(found))[2:] == [
        "| a | 3 | 1.00 | -1.00 | 1.00 |",
        "| all | 3 | 1.00 | -1.00 | 1.00 |",
    ]


def test_without_a_run_at_lag_0_there_is_nothing_to_compare_with():
    with pytest.raises(ValueError, match=r"no run at lag 0 for \[\('a', 'x'\)\]"):
        damages([Point("a", "x", 8, 60, FRESH)])


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
