"""Whole runs learn, with every collector and every scheme that it can go with."""

from __future__ import annotations

from pathlib import Path

import pytest

import run
from harness.files import read_json
from tests.collectors.remote.support import needs_ray

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.slow, pytest.mark.timeout(900)]

PAIRS = [
    ("none", "single"),
    *((sync, "single") for sync in ("shared_mem", "multiprocess")),
    *((sync, "multi_sync") for sync in ("shared_mem", "multiprocess", "hogwild")),
    *((sync, "multi_async") for sync in ("shared_mem", "multiprocess", "hogwild")),
    *((kind, kind) for kind in ("distributed", "rpc")),
    pytest.param("ray", "ray", marks=needs_ray),
]


def summary(*overrides: str) -> dict:
    assert run.main([*overrides, "logger=jsonl", "hydra.run.dir=run"]) == 0
    return read_json(Path("run/summary.json"))


@pytest.mark.parametrize(("sync", "collector"), PAIRS)
def test_ppo_solves_cartpole(sync, collector):
    found = summary("experiment=ppo_cartpole", f"sync={sync}", f"collector={collector}")
    assert found["eval/return"] >= 475


def test_the_default_run_learns():
    assert summary("total_frames=200_000")["eval/return"] >= 200


@pytest.mark.parametrize("collector", ["single", "multi_sync", "multi_async"])
def test_impala_solves_cartpole(collector):
    found = summary("experiment=impala_cartpole", f"collector={collector}")
    assert found["eval/return"] >= 450


def test_impala_learns_cartpole_from_weights_many_updates_old():
    found = summary("experiment=impala_cartpole", "collector=simulated", "collector.num_workers=16")
    assert found["policy/lag_updates_mean"] >= 10
    assert found["eval/return"] >= 300


def test_dqn_solves_cartpole():
    assert summary("experiment=dqn_cartpole")["eval/return"] > 450


def test_sac_learns_pendulum():
    assert summary("experiment=sac_pendulum")["eval/return"] >= -250
