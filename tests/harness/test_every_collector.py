"""What a run asks of its workers and of old frames, under every collector."""

from __future__ import annotations

import itertools
import math

import pytest

from harness.files import read_json
from tests.collectors.remote.support import needs_ray
from tests.harness.test_every_algorithm import ASYNCHRONOUS, SYNCHRONOUS, start
from tests.harness.test_run import records

pytestmark = pytest.mark.usefixtures("here")

PPO = ("algo=ppo", "algo.minibatch_size=16", "algo.epochs=1")
STALE = ("sync.lag={kind: cycle, values: [0, 3, 3, 3]}", "sync.max_lag=2", "sync.on_stale=mask")
CASES = {
    "stale frames of trajectories": (*STALE, "algo.objective=gspo"),
    "stale frames, states computed anew": (
        *(*STALE, "model=lstm", "model.lstm_size=8", "model.sequence_length=4"),
        *("sync.state_on_update=recompute", "algo.objective=a3po", "algo.clip_high=0.28"),
    ),
}
COLLECTORS = SYNCHRONOUS | ASYNCHRONOUS | {"single": ("collector=single",)}
QUICK = {"single", "multi_sync", "multi_async", "simulated", "distributed"}


def each():
    """Every collector with both cases; `make test` takes the first one with one of them."""
    for name, case in itertools.product(COLLECTORS, CASES):
        marks = [needs_ray] if name.startswith("ray") else []
        if name not in QUICK or ("anew" not in case and name != "single"):
            marks.append(pytest.mark.slow)
        yield pytest.param(COLLECTORS[name], case, marks=marks, id=f"{name}, {case}")


@pytest.mark.parametrize(("collector", "case"), list(each()))
def test_a_small_run_learns_from_what_is_not_stale(collector, case):
    directory = start(*PPO, *collector, *CASES[case], into="run")
    losses = [one["train/policy_loss"] for one in records(directory) if "train/policy_loss" in one]
    assert len(losses) >= 3
    assert all(map(math.isfinite, losses))
    assert read_json(directory / "summary.json")["policy/dropped"] > 0
