"""Whole runs of IMPALA and its options: how data lags, the same again, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

import run
from harness.files import read_json
from harness.run.checkpoints import Checkpoints
from harness.run_comparison import compare_records, compare_weights
from tests.harness.test_run import records, start

SMALL = (
    "algo=impala",
    "total_frames=384",
    "collector.frames_per_batch=128",
    "env.num_envs=4",
    "model.hidden_sizes=[16]",
    "evaluation.num_episodes=1",
    "logger=jsonl",
)
CLUSTER = ("collector=simulated", "collector.num_workers=3", "collector.costs.update_ms=9")
SAME = {
    "LSTM": (*CLUSTER, "model=lstm", "model.lstm_size=8"),
    "continuous": (*CLUSTER, "env=pendulum", "algo.normalise_observations=true"),
    "momentum": ("collector=multi_sync", "algo.rmsprop_momentum=0.5", "algo.epochs=2"),
    "Adam": ("collector=single", "algo.optimiser=adam"),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_it_tells_how_its_data_lags():
    status, directory = start(*SMALL, "collector=multi_async")
    assert status == 0
    last = read_json(directory / "summary.json")
    assert last["frames"] == 384
    assert last["policy/version"] == 3
    learned = [record for record in records(directory) if "train/policy_loss" in record]
    assert [record["train/gradient_steps"] for record in learned] == [1.0, 1.0, 1.0]
    assert {"policy/ess", "policy/kl", "policy/ratio_max"} <= learned[-1].keys()
    assert all(record["policy/lag_train_mean"] == 0.0 for record in learned)


@pytest.mark.parametrize("given", [("model=lstm",), ("env=pendulum",)], ids=["LSTM", "continuous"])
def test_it_runs_asynchronously_with_memory_and_continuous_actions(given):
    assert start(*SMALL, "collector=multi_async", *given)[0] == 0


def test_frames_that_lag_too_much_are_dropped_and_counted():
    given = ("collector=multi_async", "sync.max_lag=0", "total_frames=1280")
    _, directory = start(*SMALL, *given)
    late = sum(record.get("train/dropped", 0) for record in records(directory))
    assert read_json(directory / "summary.json")["policy/dropped"] == late > 0


@pytest.mark.parametrize("case", SAME)
def test_a_run_has_the_same_bits_twice_and_when_it_is_resumed(case):
    given = (*SMALL, *SAME[case], "checkpoint.every_frames=128", "checkpoint.keep=99")
    _, whole = start(*given, into="whole")
    _, again = start(*given, into="again")
    assert (compare_records(whole, again) or compare_weights(whole, again)) is None
    for file in Checkpoints(Path("again/checkpoints")).files()[1:]:
        file.unlink()
    assert run.main(["resume=again"]) == 0
    assert (compare_records(whole, again) or compare_weights(whole, again)) is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("algo.optimiser=sgd", "algo.optimiser=sgd"),
        ("algo.clip=0.2", "algo=impala has no such option"),
        ("collector.free_running=true", "it has no replay buffer to fill"),
    ],
)
def test_options_that_it_does_not_have_are_refused(given, complaint, capfd):
    status, directory = start(*SMALL, "collector=multi_async", given)
    assert status == 2
    assert not directory.exists()
    assert complaint in capfd.readouterr().err
