"""Whole runs on a simulated cluster: what lags, what is dropped, and what time passes."""

from __future__ import annotations

from pathlib import Path

import pytest

import run
from harness.files import read_json
from harness.reproduce import main
from harness.run_comparison import compare_records, compare_weights
from tests.harness.test_lag import SMALL

pytestmark = pytest.mark.usefixtures("here")

CLUSTER = (
    *("collector=simulated", "collector.num_workers=6", "collector.frames_per_batch=64"),
    *("env.num_envs=1", "total_frames=1920", "collector.costs.update_ms=9"),
)
VARIED = (
    "collector.costs.step_ms={kind: gamma, mean: 2, cv: 0.5}",
    "collector.costs.stragglers={share: 0.2, factor: 3}",
)


def start(*given, into):
    assert run.main([*given, f"hydra.run.dir={into}"]) == 0
    return Path(into)


def same(first, second):
    return compare_records(first, second) or compare_weights(first, second)


def test_reproduce_runs_a_simulated_run_again(capsys):
    start(*SMALL, *CLUSTER, *VARIED, into="original")
    assert main(["original", "--out", "again"]) == 0
    assert "identical: all metrics but times, and the final weights" in capsys.readouterr().out


def test_lag_grows_with_the_workers_and_is_bounded_by_waiting_or_dropping():
    """Were a version published for what is dropped, the batches on their way would be older yet."""
    many = (*SMALL, *CLUSTER, "collector.num_workers=16", "total_frames=6400")
    taking = read_json(start(*many, into="taking") / "summary.json")
    assert taking["policy/version"] == taking["updates"] == 100  # all batches
    assert taking["policy/lag_updates_max"] > 5
    lags = []
    for workers in (1, 4):
        given = (*SMALL, *CLUSTER, f"collector.num_workers={workers}")
        summary = read_json(start(*given, into=f"of {workers}") / "summary.json")
        lags.append(summary["policy/lag_updates_mean"])
    assert lags[0] < lags[1] < taking["policy/lag_updates_mean"]
    waiting = start(*many, *VARIED, "sync.max_lag=5", "sync.on_stale=wait", into="waiting")
    assert read_json(waiting / "summary.json")["policy/lag_updates_max"] <= 5
    dropping = start(*many, "sync.max_lag=5", into="dropping")
    summary = read_json(dropping / "summary.json")
    used = summary["frames"] - summary["policy/dropped"]
    assert 20 < summary["updates"] == summary["policy/version"] <= used / 16
    assert summary["updates"] < 90
    assert summary["sim/time_s"] < taking["sim/time_s"] * 0.95


def test_an_exact_lag_comes_on_top_of_the_queue():
    given = (*SMALL, *CLUSTER, "collector.num_workers=1", "collector.batches_ahead=1")
    plain = read_json(start(*given, into="plain") / "summary.json")
    lagging = read_json(start(*given, "sync.lag=3", into="lagging") / "summary.json")
    assert plain["policy/lag_updates_max"] == 1
    assert plain["sim/time_s"] > 0
    assert lagging["policy/lag_updates_max"] == 4


@pytest.mark.slow
def test_256_virtual_workers_learn_cartpole():
    given = (
        *("collector=simulated", "collector.num_workers=256", "collector.frames_per_batch=128"),
        *("env.num_envs=4", "total_frames=600000", "log_every_frames=10000", "logger=jsonl"),
        *("algo.epochs=1", "algo.learning_rate=1e-4", "algo.minibatch_size=128"),
    )
    first = start(*given, into="first")
    assert same(first, start(*given, into="second")) is None
    assert read_json(first / "summary.json")["eval/return"] > 400


def test_lag_is_that_of_the_frames_that_were_learned_from(capsys):
    """Of 24 workers two batches ahead most frames are too old: they are counted, and told."""
    many = ("collector.num_workers=24", "sync.max_lag=4", "env.num_envs=2", "total_frames=3840")
    summary = read_json(start(*SMALL, *CLUSTER, *many, into="run") / "summary.json")
    assert summary["policy/dropped"] > 0.5 * summary["frames"]
    assert summary["policy/lag_max"] <= 4
    assert summary["policy/lag_updates_max"] <= 4
    shown = capsys.readouterr().out
    assert "sync: simulated, 24 workers in virtual time, float32, added lag 0\n" in shown
    dropped, share = summary["policy/dropped"], summary["policy/dropped"] / summary["frames"]
    assert f"{dropped:,} ({share:.0%})" in shown
    assert f"warning: {dropped:,} of {summary['frames']:,} frames were not learned from" in shown
    assert "or let them wait (sync.on_stale=wait)" in shown


def test_workers_that_take_weights_between_episodes_are_not_advised_to_wait(capsys):
    many = ("collector.num_workers=24", "sync.max_lag=4", "env.num_envs=1", "total_frames=3840")
    start(*SMALL, *CLUSTER, *many, "sync.apply_at=episode", into="run")
    shown = capsys.readouterr().out
    assert "frames were not learned from" in shown
    assert "on_stale=wait" not in shown.partition("frames were not learned from")[2]
