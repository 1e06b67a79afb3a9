"""A policy that has a `worker_idx` knows which worker it acts in."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from collectors import (
    Collector,
    DistributedCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
    SimulatedCollector,
    Simulator,
)
from sync import NoWeightSyncScheme

make_env = partial(gym.make, "CartPole-v1")


class Tells(nn.Module):
    """Puts out the worker that it acts in."""

    out_keys = ("action", "told")

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.worker_idx = 0

    def forward(self, observation):
        told = torch.full(observation.shape[:1], self.worker_idx)
        return self.layer(observation).argmax(-1), told


def tells_within():
    return TensorDictModule(Tells(), in_keys=["observation"], out_keys=["action", "told"])


def simulated(env, policy, *, num_workers, **options):
    schedule = Simulator(num_workers=num_workers, num_steps=8, seed=0)
    return SimulatedCollector(env, policy, schedule=schedule, num_workers=num_workers, **options)


def check(collector, workers):
    """Collect until all these workers have been heard of."""
    missing = set(workers)
    while missing:
        batch = collector.next()
        assert torch.equal(batch["told"], batch["collector", "worker"])
        told = set(batch["told"].unique().tolist())
        assert told <= workers
        missing -= told


@pytest.mark.parametrize(
    ("kind", "policy"),
    [(MultiSyncCollector, tells_within), (MultiAsyncCollector, Tells), (simulated, tells_within)],
)
def test_every_worker_tells_its_policy(kind, policy):
    frames = 24 if kind is MultiSyncCollector else 8
    given = policy()
    with kind(make_env, given, num_workers=3, frames_per_batch=frames) as collector:
        check(collector, {0, 1, 2})
        collector.update_policy_weights_()
        check(collector, {0, 1, 2})
    inner = given if isinstance(given, Tells) else given.module
    assert inner.worker_idx == 0


@pytest.mark.parametrize("options", [{}, {"worker_idx": 2}])
def test_one_process_is_worker_zero_or_what_it_is_told(options):
    with Collector(make_env, Tells(), frames_per_batch=8, **options) as collector:
        check(collector, {options.get("worker_idx", 0)})


def test_a_policy_that_is_shared_with_the_trainer_is_left_alone():
    schemes = {"policy": NoWeightSyncScheme()}
    policy = Tells()
    with Collector(make_env, policy, frames_per_batch=8, weight_sync_schemes=schemes) as collector:
        check(collector, {0})
    assert policy.worker_idx == 0


def test_a_policy_made_in_the_worker_is_told_too():
    options = {"num_workers": 2, "frames_per_batch": 8}
    with MultiAsyncCollector(make_env, policy_factory=Tells, **options) as collector:
        check(collector, {0, 1})


@pytest.mark.parametrize(
    "given", [{"policy_factory": Tells}, pytest.param({"policy": Tells()}, marks=pytest.mark.slow)]
)
def test_workers_are_counted_over_all_nodes(given):
    options = {"num_collectors": 2, "num_workers_per_collector": 2, "launcher": "local"}
    with DistributedCollector(make_env, frames_per_batch=32, **given, **options) as collector:
        batch = collector.next()
    assert batch["told"][:, 0].tolist() == [0, 1, 2, 3]
