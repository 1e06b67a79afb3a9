"""The collectors' promises, with hosts elsewhere: nothing torn, stamps true, nothing lost."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from sync import Link
from tests.collectors.remote.support import RAY_IS_SLOW, make, needs_ray
from tests.promises.collector_probe import (
    Judge,
    Trainer,
    VersionPolicy,
    balance,
    make_cartpole,
    meanwhile,
)

FRAMES = 2_000
build = partial(make, create_env_fn=make_cartpole, frames_per_batch=200)


@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        ("distributed", True),
        ("rpc", False),
        *(
            pytest.param(*one, marks=[pytest.mark.slow, needs_ray])
            for one in (("distributed", False), ("rpc", True), ("ray", True), ("ray", False))
        ),
    ],
)
def test_no_frame_is_torn_or_wrongly_stamped_or_lost_in_a_flood(kind, sync):
    policy, judge = VersionPolicy(), Judge()
    unaccounted: list[int] = []
    scheme = _scheme(kind, sync=False)
    with build(kind, policy=policy, sync=sync, weight_sync_schemes={"policy": scheme}) as collector:
        trainer = Trainer(collector, policy)
        with meanwhile(trainer.publish), meanwhile(lambda: unaccounted.append(balance(collector))):
            while judge.frames < FRAMES:
                judge.take(collector.next())
        stats = collector.stats()
        assert all(counts["versions"] > 3 for counts in scheme.stats["moved"].values())
    assert judge.violations() == {}
    assert set(unaccounted) == {0}
    assert stats["dropped"] == 0
    assert stats["delivered"] == judge.frames
    assert len(judge.versions) > 3  # the flood did reach the hosts, also within batches


@pytest.mark.parametrize("kind", RAY_IS_SLOW)
def test_a_batch_has_weights_no_older_than_the_last_update(kind):
    policy, judge = VersionPolicy(), Judge()
    late = {"sync": False, "link": Link(latency_ms=50)} if kind == "distributed" else {}
    schemes = {"policy": _scheme(kind, **late)}
    with build(kind, policy=policy, weight_sync_schemes=schemes) as collector:
        trainer = Trainer(collector, policy)
        for _ in range(10):
            version = trainer.publish()
            batch = collector.next()
            judge.take(batch)
            assert set(batch["policy_version"].flatten().tolist()) == {version}
    assert judge.violations() == {}


def test_with_apply_at_batch_no_batch_mixes_versions():
    policy, judge = VersionPolicy(), Judge()
    options = {"sync": False, "apply_at": "batch"}
    scheme = _scheme("distributed", sync=False)
    options["weight_sync_schemes"] = {"policy": scheme}
    with build("distributed", policy=policy, **options) as collector:
        trainer = Trainer(collector, policy)
        with meanwhile(trainer.publish):
            while judge.frames < FRAMES:
                judge.take(collector.next())
    assert judge.violations() == {}
    assert judge.mixed_batches == 0
    assert len(judge.versions) > 3


def test_changes_in_place_reach_no_host_until_they_are_published():
    policy, judge = VersionPolicy(), Judge()
    with build("distributed", policy=policy) as collector:
        version = Trainer(collector, policy).publish()
        numbers = itertools.count(1_000_000)
        with meanwhile(lambda: policy.hold(next(numbers))):
            for _ in range(10):
                judge.take(collector.next())
        assert judge.versions == {version}
    assert judge.violations() == {}


def test_only_the_hosts_that_are_named_get_the_weights():
    policy, judge = VersionPolicy(), Judge()
    with build("distributed", policy=policy, sync=False) as collector:
        trainer = Trainer(collector, policy)
        collector.next()
        with meanwhile(lambda: trainer.publish(worker_ids=[0])):
            while len(judge.by_worker[0]) < 20 or len(judge.by_worker[1]) < 20:
                judge.take(collector.next())
    assert judge.violations() == {}
    assert max(judge.by_worker[0]) > 1
    assert set(judge.by_worker[1]) == {0}


def test_a_host_waits_for_a_learner_that_sleeps():
    with build("distributed", policy=VersionPolicy(), sync=False) as collector:
        for _ in range(4):
            collector.next()
            while any(handle.owed for handle in collector.pool.handles):
                collector.stats()
            stats = collector.stats()
            assert stats["in_flight"] == 2 * 2 * 200
            assert stats["dropped"] == 0


def _scheme(kind, **options):
    import sync

    names = {"distributed": "Distributed", "rpc": "RPC", "ray": "Ray"}
    return getattr(sync, f"{names[kind]}WeightSyncScheme")(**options)
