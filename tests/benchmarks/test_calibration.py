"""The table of `benchmarks/calibration.py`, and what it reads off a simulated run."""

from __future__ import annotations

import json

import pytest

from benchmarks.calibration import Row, main, table, trained

pytestmark = pytest.mark.slow


def test_errors_are_relative_to_what_was_measured():
    rows = [Row("two", "lag, mean", 4.0, 3.9), Row("two", "frames a second", 10_000.0, 11_000.0)]
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


def test_unknown_cases_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--cases", "two,tow"])
    assert ended.value.code == 2
    assert "--cases tow: known are two, wan, fast_learner" in capsys.readouterr().err
