"""Runs that the seed determines: the same bits twice, and when one goes on from a checkpoint.

A case that `make test` takes varies several things at once; `make slow` has each by itself.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import run
from harness.files import read_json
from harness.run.checkpoints import Checkpoints
from harness.run.training_loop import TrainingLoop
from harness.run_comparison import compare_records, compare_weights, records

pytestmark = pytest.mark.usefixtures("here")

SMALL = ("env.num_envs=4", "model.hidden_sizes=[16]", "logger=jsonl", "checkpoint.keep=99")
ON_POLICY = (
    *(*SMALL, "total_frames=768", "collector.frames_per_batch=128"),
    *("evaluation.num_episodes=1", "checkpoint.every_frames=128"),
)
PPO = (*ON_POLICY, "algo.minibatch_size=64", "algo.epochs=2")
IMPALA = (*ON_POLICY, "algo=impala")
REPLAY = (
    *(*SMALL, "total_frames=160", "collector.frames_per_batch=16", "checkpoint.every_frames=16"),
    *("algo.learning_starts=32", "algo.batch_size=16", "algo.buffer_size=1000"),
    "evaluation.at_end=false",
)
DQN = (*REPLAY, "algo=dqn", "algo.epsilon_frames=100")
APE_X = (
    *(*DQN, "algo.n_steps=3", "algo.prioritised=true", "algo.duelling=true"),
    "algo.epsilon_per_worker=true",
)
SAC = (*REPLAY, "algo=sac", "env=pendulum")

CLUSTER = (
    *("collector=simulated", "collector.num_workers=6", "collector.costs.update_ms=9"),
    "collector.costs.step_ms={kind: gamma, mean: 2, cv: 0.5}",
    "collector.costs.stragglers={share: 0.2, factor: 3}",
)
NETWORK = ("sync.link.preset=wan", "collector.network.port_mbps=5")
FAILURES = ("collector.failures=[{worker: 1, at_s: 0.2, back_after_s: 0.1}]",)
SIMULATED = (*PPO, *CLUSTER, "collector.frames_per_batch=64", "env.num_envs=1")
LSTM = ("model=lstm", "model.lstm_size=8")
BY_WORKER = ("sync.lag={kind: cycle, values: [0, 3, 2], per: worker}",)
DRAWN = ("sync.lag={kind: uniform, low: 0, high: 3}",)
TEAR = ("sync.tear.share=0.3", "sync.tear.span=2", "sync.tear.unit=element")
NORMALISED = ("algo.normalise_observations=true",)

# Each with the numbers of checkpoints after which it goes on. An early one is of a time at which
# there are fewer versions than are kept.
CASES = {
    "PPO, averaged": (
        (*PPO, "collector=single", "sync=none", "algo.objective=ewma", *NORMALISED),
        (2,),
    ),
    # Workers act with older weights than the run has, and its next record tells of frames before.
    "PPO, an interval": (
        (*PPO, "collector=multi_sync", "sync.interval=2", "sync.wire=int8", "log_every_frames=300"),
        (1,),
    ),
    "PPO, a lag": (
        (*PPO, "collector=multi_sync", "sync=multiprocess", "sync.lag=4", "sync.wire=int8"),
        (5,),
    ),
    "PPO, a drawn lag, torn, resumed twice": (
        (*PPO, "collector=multi_sync", *DRAWN, *TEAR),
        (2, 4),
    ),
    "SAC, a lag, torn": ((*SAC, "collector=multi_sync", "sync.lag=2", *TEAR, *NORMALISED), (6,)),
    "DQN, as Ape-X, simulated, an interval": (
        (
            *(*APE_X, "collector=simulated", "collector.num_workers=2"),
            *("sync.interval=3", "log_every_frames=48"),
        ),
        (4,),
    ),
    "IMPALA, on hosts": (
        (
            *(*IMPALA, "collector=distributed", "sync=distributed"),
            *("algo.rmsprop_momentum=0.5", "algo.epochs=2"),
        ),
        (1,),
    ),
    "IMPALA, simulated, LSTM": (
        (*IMPALA, *CLUSTER, *LSTM, *NORMALISED, "env=pendulum", "algo.optimiser=adam"),
        (1,),
    ),
    "PPO, a network, failures": ((*SIMULATED, *NETWORK, *FAILURES), (2, 5)),
    "PPO, simulated, a lag by worker": ((*SIMULATED, *BY_WORKER, *NETWORK), (1, 4)),
}
SLOW = {
    "PPO, a lag, one process": ((*PPO, "collector=single", "sync.lag=4"), (1, 5)),
    "PPO, a lag, early": (
        (*PPO, "collector=multi_sync", "sync=multiprocess", "sync.lag=4", "sync.wire=int8"),
        (1,),
    ),
    "PPO, a drawn lag": ((*PPO, "collector=multi_sync", *DRAWN), (1, 5)),
    "PPO, a lag by worker": (
        (*PPO, "collector=multi_sync", *BY_WORKER),
        (1, 5),
    ),
    "PPO, torn": ((*PPO, "collector=single", *TEAR), (1, 5)),
    "PPO, torn, an interval": (
        (*PPO, "collector=single", "sync.tear.share=0.5", "sync.interval=2"),
        (1, 5),
    ),
    "SAC, early": ((*SAC, "collector=multi_sync", "sync.lag=2", *TEAR), (1,)),
    "DQN": ((*DQN, "collector=simulated", "collector.num_workers=2"), (4,)),
    "DQN, as Ape-X, one process": ((*APE_X, "collector=single", "sync=none"), (4,)),
    "DQN, as Ape-X, processes": ((*APE_X, "collector=multi_sync", "sync=multiprocess"), (4,)),
    "steps": (SIMULATED, (2, 5)),
    "batches": ((*SIMULATED, "sync.apply_at=batch", "sync.wire=int8"), (2, 5)),
    "episodes": ((*SIMULATED, "sync.apply_at=episode"), (2, 5)),
    "a tree": (
        (
            *(*SIMULATED, "collector.network.topology=tree", "collector.network.port_mbps=5"),
            "sync.blocking=true",
        ),
        (2, 5),
    ),
    "waiting": ((*SIMULATED, "sync.max_lag=3", "sync.on_stale=wait"), (2, 5)),
    "dropping": ((*SIMULATED, "sync.max_lag=3"), (2, 5)),
    "a lag": ((*SIMULATED, "sync.lag={kind: uniform, high: 4}"), (2, 5)),
    "LSTM": ((*SIMULATED, *LSTM), (2, 5)),
    "SAC, simulated": ((*SAC, *CLUSTER), (2, 5)),
}


@pytest.fixture(autouse=True)
def drawing(monkeypatch):
    """As if algorithms drew from the global random streams, which none of ours does."""
    update = TrainingLoop.update

    def draw(runner, batch):
        drawn = torch.rand(()).item() + np.random.rand() + random.random()
        runner.meters["trained"]._means.add({"train/drawn": drawn})
        return update(runner, batch)

    monkeypatch.setattr(TrainingLoop, "update", draw)


def start(*given: str, into: str) -> Path:
    assert run.main([*given, f"hydra.run.dir={into}"]) == 0
    return Path(into)


def same(first: Path, second: Path) -> object:
    """What differs first; None if nothing does."""
    return compare_records(first, second) or compare_weights(first, second)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_a_run_has_the_same_bits_twice_and_when_it_is_resumed(case):
    given, resumed_after = (CASES | SLOW)[case]
    whole, again = (start(*given, into=into) for into in ("whole", "again"))
    assert same(whole, again) is None
    for number in resumed_after:
        for file in Checkpoints(again / "checkpoints").files()[number:]:
            file.unlink()
        assert run.main([f"resume={again}"]) == 0
        assert same(whole, again) is None
    losses = [
        value
        for record in records(whole)
        for name, value in record.items()
        if name in ("train/loss", "train/policy_loss", "train/critic_loss")
    ]
    assert losses
    assert all(map(math.isfinite, losses))
    summary, resumed = (read_json(one / "summary.json") for one in (whole, again))
    figures = {name: value for name, value in summary.items() if name.startswith("policy/")}
    assert figures == {name: resumed[name] for name in figures}
    assert sum("lag_updates" in name for name in figures) == 3
    counts = {name: summary[f"collector/{name}"] for name in ("delivered", "dropped", "in_flight")}
    assert summary["collector/collected"] == sum(counts.values())
    assert (counts["dropped"] > 0) == ("failures" in case)


def test_another_seed_gives_another_run():
    given = (*PPO, "collector=single", "total_frames=128")
    first, second = (start(*given, f"seed={seed}", into=f"{seed}") for seed in (1, 2))
    assert compare_weights(first, second) is not None
