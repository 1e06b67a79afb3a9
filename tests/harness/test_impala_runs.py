"""Whole runs of IMPALA and its options: how its data lags, and what it refuses."""

from __future__ import annotations

import pytest

from harness.files import read_json
from tests.harness.test_run import records, start

pytestmark = pytest.mark.usefixtures("here")

SMALL = (
    "algo=impala",
    "total_frames=384",
    "collector.frames_per_batch=128",
    "env.num_envs=4",
    "model.hidden_sizes=[16]",
    "evaluation.num_episodes=1",
    "logger=jsonl",
)


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
