"""Which change helps a run that became worse: the arms, and where they begin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import run
from harness.branch.why import before_the_fall, main, suspects
from harness.config.plan import plan_run
from harness.errors import ConfigError
from harness.files import write_json
from tests.harness.small import SMALL

pytestmark = pytest.mark.usefixtures("here")

LAGGING = {"policy/lag_p95": 5.0, "policy/lag_max": 9.0}


@pytest.mark.parametrize(
    ("overrides", "summary", "arms"),
    [
        (("collector=single",), {}, ["algo.clip=0.1", "algo.learning_rate=0.000125"]),
        (
            ("collector=single", "sync.lag=4"),
            {},
            ["sync.lag=0", "algo.clip=0.1", "algo.learning_rate=0.000125"],
        ),
        (
            ("collector=multi_async", "sync.lag=4"),
            LAGGING,
            ["sync.lag=0", "collector.batches_ahead=1", "algo.max_lag=5", "algo.clip=0.1"],
        ),
        (("collector=multi_async", "sync.max_lag=7"), LAGGING, ["collector.batches_ahead=1"]),
        (("algo=dqn", "collector=single"), LAGGING, ["algo.learning_rate=0.000125"]),
    ],
)
def test_each_arm_takes_away_what_the_run_has(overrides, summary, arms):
    stored = plan_run([*SMALL[:1], *overrides, "algo.learning_rate=0.00025"]).options
    names = [arm.name for arm in suspects(stored, summary)]
    assert names[: len(arms)] == arms
    assert all(len(arm.values) == 1 for arm in suspects(stored, summary))


def fallen(returns: list[float]) -> Path:
    """A run of 50 updates with these returns in evaluation, at even distances."""
    directory = Path("fallen")
    directory.mkdir()
    steps = [1000 * (i + 1) // len(returns) for i in range(len(returns))]
    records = [{"step": s, "eval/return": r} for s, r in zip(steps, returns, strict=True)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return directory


SUMMARY = {"updates": 50, "frames": 1000}


def test_the_arms_begin_at_the_highest_return():
    assert before_the_fall(fallen([1.0, 5.0, 20.0, 18.0, 3.0]), SUMMARY) == 30


@pytest.mark.parametrize("returns", [[1.0, 5.0, 20.0], [1.0, 5.0, 20.0, 17.0]])
def test_a_run_that_did_not_fall_needs_a_moment(returns):
    with pytest.raises(ConfigError, match="does not fall after its highest value; name"):
        before_the_fall(fallen(returns), SUMMARY)


def test_a_run_without_a_course_of_returns_needs_a_moment():
    with pytest.raises(ConfigError, match="no course of returns to look at; name --at UPDATES"):
        before_the_fall(fallen([1.0]), SUMMARY)


def test_a_run_is_continued_in_each_arm_and_compared(capsys):
    assert run.main([*SMALL, "total_frames=1024", "sync.lag=2", "hydra.run.dir=parent"]) == 0
    assert main(["parent", "--at", "4", "--repeats", "1", "--out", "out"]) == 0
    out = capsys.readouterr().out
    assert "from update 4: control, sync.lag=0, algo.clip=0.1, algo.learning_rate=" in out
    assert "[4/4]" in out
    assert Path("out/report/report.html").is_file()


def test_a_damaged_run_is_refused_in_one_line(capsys):
    Path("parent").mkdir()
    write_json(Path("parent/status.json"), {"state": "done"})
    assert main(["parent"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "why: parent is not a run directory: it has no config.yaml"
