"""Promises 1 to 4 and 6, frame by frame: every collector, with every scheme, under a flood."""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import pytest
import torch

from collectors import BaseCollector
from sync import HogwildWeightSyncScheme
from tests.promises.collector_probe import (
    COLLECTORS,
    SCHEMES,
    Judge,
    Trainer,
    VersionPolicy,
    balance,
    make_cartpole,
    meanwhile,
)

FRAMES, VERSIONS = 2_000, 50  # at least
# Every collector meets every scheme and every `apply_at`; the other combinations are slow tests.
QUICK = [
    ("single", "shared_mem", "step"),
    ("single", "multiprocess", "batch"),
    ("multi_sync", "multiprocess", "step"),
    ("multi_sync", "shared_mem", "batch"),
    ("multi_async", "shared_mem", "step"),
    ("multi_async", "multiprocess", "batch"),
]
MATRIX = [
    pytest.param(*way, marks=[] if way in QUICK else pytest.mark.slow)
    for way in itertools.product(COLLECTORS, SCHEMES, ("step", "batch"))
]


@pytest.fixture(autouse=True)
def _threads_that_take_turns_often():
    before = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    yield
    torch.set_num_threads(before[0])
    sys.setswitchinterval(before[1])


def make(
    kind: str, scheme: Any, policy: VersionPolicy, *, workers: int = 2, **options: Any
) -> BaseCollector:
    if kind != "single":
        options["num_workers"] = workers
    return COLLECTORS[kind](
        make_cartpole,
        policy,
        weight_sync_schemes={"policy": scheme},
        **{"frames_per_batch": 200, **options},
    )


@pytest.mark.parametrize(("kind", "scheme", "apply_at"), MATRIX)
def test_no_frame_is_torn_or_wrongly_stamped_or_lost(kind, scheme, apply_at):
    policy, judge = VersionPolicy(), Judge()
    unaccounted: list[int] = []
    with make(kind, SCHEMES[scheme](sync=False), policy, apply_at=apply_at) as collector:
        trainer = Trainer(collector, policy)

        def look() -> None:
            unaccounted.append(balance(collector))

        with meanwhile(trainer.publish), meanwhile(look):
            while judge.frames < FRAMES or len(judge.versions) < VERSIONS:
                judge.take(collector.next())
        stats = collector.stats()
    assert judge.violations() == {}
    assert set(unaccounted) == {0}
    assert stats["dropped"] == 0
    assert stats["delivered"] == judge.frames
    if apply_at == "batch":
        assert judge.mixed_batches == 0
    else:
        assert judge.mixed_batches > 0


@pytest.mark.parametrize(("kind", "scheme", "apply_at"), MATRIX)
def test_a_batch_has_the_weights_that_were_published_last_and_no_others(kind, scheme, apply_at):
    policy, judge = VersionPolicy(), Judge()
    with make(kind, SCHEMES[scheme](), policy, apply_at=apply_at) as collector:
        trainer = Trainer(collector, policy)
        for _ in range(20):
            version = trainer.publish()
            batch = collector.next()
            judge.take(batch)
            if kind != "multi_async":  # there, frames lie ready that were made before
                assert set(batch["policy_version"].flatten().tolist()) == {version}
        if kind == "multi_async":
            for _ in range(6):
                batch = collector.next()
            assert set(batch["policy_version"].flatten().tolist()) == {version}
        assert judge.violations() == {}
        # Changes in place reach no worker until they are published.
        judge, numbers = Judge(), itertools.count(1_000_000)
        with meanwhile(lambda: policy.hold(next(numbers))):
            for _ in range(10):
                judge.take(collector.next())
        assert judge.versions == {version}
        assert judge.violations() == {}
        policy.hold(version + 1)
        collector.update_policy_weights_()
        for _ in range(6):
            batch = collector.next()
        assert set(batch["low"].flatten().tolist()) == {version + 1}


@pytest.mark.parametrize(
    ("kind", "scheme"), [("multi_sync", "multiprocess"), ("multi_async", "shared_mem")]
)
def test_only_the_workers_that_are_named_get_the_weights(kind, scheme):
    policy, judge = VersionPolicy(), Judge()
    with make(kind, SCHEMES[scheme](), policy, workers=3, frames_per_batch=210) as collector:
        trainer = Trainer(collector, policy)
        with meanwhile(lambda: trainer.publish(worker_ids=[0])):
            for _ in range(20):
                judge.take(collector.next())
        last = trainer.publish(worker_ids=2)
        for _ in range(12):
            judge.take(collector.next())
    assert judge.violations() == {}
    assert max(judge.by_worker[0]) > 1
    assert set(judge.by_worker[1]) == {0}
    assert set(judge.by_worker[2]) == {0, last}


@pytest.mark.parametrize("kind", ["multi_sync", "multi_async"])
def test_nothing_is_dropped_when_the_learner_sleeps(kind):
    policy = VersionPolicy()
    with make(kind, SCHEMES["shared_mem"](), policy) as collector:
        collector.next()
        unaccounted: list[int] = []
        resting = threading.Event()

        def look() -> None:
            unaccounted.append(balance(collector))
            if all(worker["stage"] == "idle" for worker in collector.stats()["workers"]):
                resting.set()

        with meanwhile(look):
            for _ in range(5):
                resting.clear()
                assert resting.wait(30.0), "the workers did not come to rest"
                collector.next()
        stats = collector.stats()
        assert set(unaccounted) == {0}
        assert stats["dropped"] == 0
        if kind == "multi_async":  # they ran ahead by what they have room for, then waited
            assert stats["in_flight"] <= 2 * 2 * 200
            assert stats["collected"] > stats["delivered"]


def test_hogwild_breaks_these_promises_as_it_says_and_counts_it():
    policy, judge = VersionPolicy(width=256), Judge()
    scheme = HogwildWeightSyncScheme(check_every=1)
    with make("multi_async", scheme, policy) as collector:
        numbers = itertools.count(1)
        with meanwhile(lambda: policy.hold(next(numbers))):
            while judge.frames < 2_000:
                judge.take(collector.next())
        assert judge.versions == {0}  # nothing was ever sent
        assert judge.torn > 0

        def counted(name: str) -> list[float]:
            workers = collector.stats()["sync"]["policy"]["workers"]
            return [worker["torn"][name] for worker in workers.values()]

        def collect_further(calls: int) -> None:
            begun = counted("checked")
            while any(
                now < then + calls for now, then in zip(counted("checked"), begun, strict=True)
            ):
                collector.next()

        assert all(count > 0 for count in counted("torn"))
        collect_further(1)  # calls that the last step in place may have torn are over
        torn = counted("torn")
        collect_further(100)
        assert counted("torn") == torn
