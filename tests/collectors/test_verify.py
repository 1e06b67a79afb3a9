"""`verify` in collectors: workers act only with weights as they were published."""

from __future__ import annotations

import pytest
import torch

from sync import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightsDiffer,
    WorkerError,
)
from tests.collectors.remote.support import make as make_remote
from tests.promises.collector_probe import COLLECTORS, Judge, Trainer, VersionPolicy, make_cartpole

SCHEMES = {
    "shared_copy": SharedMemWeightSyncScheme,
    "shared_zero_copy": lambda **options: SharedMemWeightSyncScheme(zero_copy=True, **options),
    "multiprocess": MultiProcessWeightSyncScheme,
}


class Writing(VersionPolicy):
    """Adds to one of its parameters in its tenth call, and counts the calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, observation):
        self.calls += 1
        if self.calls == 10:
            self.body[0].bias.data += 0.5
        return super().forward(observation)


def make(kind, policy, scheme, **options):
    options = {"frames_per_batch": 100, "weight_sync_schemes": {"policy": scheme}, **options}
    if kind != "single":
        options["num_workers"] = 1
    return COLLECTORS[kind](make_cartpole, policy, **options)


@pytest.mark.parametrize(
    ("kind", "scheme", "verify"),
    zip(COLLECTORS, SCHEMES, ("every", "sampled", "every"), strict=True),
)
def test_a_clean_run_passes_and_says_how_many_calls_were_verified(kind, scheme, verify):
    policy, judge = VersionPolicy(), Judge()
    made = SCHEMES[scheme](verify=verify, sync=False)
    with make(kind, policy, made) as collector:
        trainer = Trainer(collector, policy)
        for _ in range(8):
            judge.take(collector.next())
            trainer.publish()
        collector.next()
        made.wait_async()
        assert judge.violations() == {}
        calls = judge.frames // 2  # of two environments
        assert made.verified_calls >= (calls // 2 if verify == "every" else calls // 200) > 0


@pytest.mark.parametrize(
    ("kind", "scheme"), [("single", "multiprocess"), ("multi_sync", "shared_copy")]
)
def test_a_policy_that_writes_to_its_parameters_ends_the_run(kind, scheme):
    made = SCHEMES[scheme](verify="every")
    error = WeightsDiffer if kind == "single" else WorkerError
    with (
        make(kind, Writing(), made) as collector,
        pytest.raises(error, match=r"worker 0, version 0: 'body.0.bias' changed in the worker"),
    ):
        collector.next()


def make_node(policy):
    schemes = {"policy": DistributedWeightSyncScheme(verify="every")}
    return make_remote(
        "distributed",
        make_cartpole,
        policy,
        num_collectors=1,
        weight_sync_schemes=schemes,
        frames_per_batch=100,
    )


def test_a_node_verifies_what_arrives():
    policy, judge = VersionPolicy(), Judge()
    with make_node(policy) as collector:
        trainer = Trainer(collector, policy)
        for _ in range(3):
            judge.take(collector.next())
            trainer.publish()
        assert judge.violations() == {}


def test_the_workers_of_a_node_verify_what_they_use():
    with (
        make_node(Writing()) as collector,
        pytest.raises(WorkerError, match=r"WeightsDiffer: .* 'body.0.bias' changed in the worker"),
    ):
        collector.next()
