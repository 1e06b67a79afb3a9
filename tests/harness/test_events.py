"""The trace of a run's samples: what `callbacks=[events]` writes keeps every rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import run
from lockstep_check.check import CheckResult, check
from lockstep_check.rules import Limit

SMALL = [
    "experiment=ppo_cartpole",
    "total_frames=2048",
    "seed=2",
    "logger=jsonl",
    "evaluation.at_end=false",
    "callbacks=[events]",
]
CHECKED = {
    "age within the limit",
    "the reported age is the age at use",
    "the stamp is the version that acted",
    "made = trained + dropped + in flight",
    "trained as long as made",
    "versions never go back",
    "published before it is used",
}


def traced(place: Path, *overrides: str, limit: int | None = None) -> CheckResult:
    assert run.main([*SMALL, f"hydra.run.dir={place}", *overrides]) == 0
    return check(place / "events.jsonl", Limit(limit))


def events(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("collector", ["single", "multi_sync", "multi_async", "simulated"])
def test_the_trace_of_a_run_keeps_every_rule(collector: str, tmp_path: Path) -> None:
    result = traced(tmp_path / "run", f"collector={collector}")
    assert {one.rule.name for one in result.findings if one.holds} == CHECKED
    assert result.broken == []


def test_an_exact_lag_is_the_age_at_use(tmp_path: Path) -> None:
    place = tmp_path / "run"
    assert traced(place, "collector=multi_sync", "sync.lag=3", limit=3).broken == []
    ages = [event["update"] - 1 for event in events(place) if event["event"] == "train"]
    assert check(place / "events.jsonl", Limit(2)).broken
    assert max(ages) > 3


def test_what_is_dropped_for_its_lag_is_a_drop(tmp_path: Path) -> None:
    place = tmp_path / "run"
    options = ["collector=simulated", "collector.batches_ahead=4", "sync.max_lag=1"]
    result = traced(place, *options, "sync.on_stale=drop", limit=1)
    assert result.broken == []
    dropped = [event for event in events(place) if event["event"] == "drop"]
    assert dropped
    assert {event["reason"] for event in dropped} == {"older than sync.max_lag"}
    summary = json.loads((place / "summary.json").read_text())
    assert sum(event["length"] for event in dropped) == summary["policy/dropped"]


def test_frames_that_are_dropped_for_their_version_leave_the_ages_of_the_rest(
    tmp_path: Path,
) -> None:
    place = tmp_path / "run"
    options = ["collector=simulated", "collector.num_workers=4", "collector.batches_ahead=1"]
    options += ["collector.frames_per_batch=128", "env.num_envs=2", "sync.max_lag=2"]
    assert traced(place, *options, "sync.on_stale=drop", limit=2).broken == []
    ends = [
        {(event["worker"], event["sample"]) for event in events(place) if event["event"] == kind}
        for kind in ("drop", "train")
    ]
    assert set.intersection(*ends)  # a part of them was dropped


def test_lag_zero_has_the_trace_of_a_synchronous_run(tmp_path: Path) -> None:
    from lockstep_check.same import first_difference

    one, other = tmp_path / "one", tmp_path / "other"
    traced(one, "collector=single")
    traced(other, "collector=single", "sync=multiprocess")
    assert first_difference(one / "events.jsonl", other / "events.jsonl") == (8, "")


def test_a_resumed_run_goes_on_in_its_trace(tmp_path: Path) -> None:
    place = tmp_path / "run"
    traced(place, "collector=multi_sync", "sync.lag=2")
    with open(place / "events.jsonl", "a") as stream:
        stream.write('{"event": "tra')  # what a killed run may leave
    assert run.main([f"resume={place}", "total_frames=4096"]) == 0
    result = check(place / "events.jsonl", Limit(2))
    assert (result.resumed, result.broken) == (1, [])
    trained = [event["update"] for event in events(place) if event["event"] == "train"]
    assert sorted(set(trained)) == list(range(1, max(trained) + 1))


def test_a_link_in_the_place_of_the_trace_is_not_written_through(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    traced(place, "collector=single")
    elsewhere.write_text("mine")
    (place / "events.jsonl").unlink()
    (place / "events.jsonl").symlink_to(elsewhere)
    assert run.main([f"resume={place}", "total_frames=4096"]) == 1
    assert elsewhere.read_text() == "mine"


def test_an_algorithm_with_a_replay_buffer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["algo=dqn", "callbacks=[events]", f"hydra.run.dir={tmp_path / 'run'}"]
    assert run.main(chosen) == 2
    assert "draws from a replay buffer: use algo=ppo" in capsys.readouterr().err
