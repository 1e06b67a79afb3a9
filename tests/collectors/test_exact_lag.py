"""Exact lag under every collector: stamps and weights of each frame, also after a restart."""

from __future__ import annotations

import os
import signal

import pytest

from sync import Link, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from tests.collectors.support import all_accounted_for, build, publish
from tests.collectors.troubled import pids

LAG = 4
SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]
LINK = Link(latency_ms=2, jitter_ms=1)
CASES = [
    ("single", SharedMemWeightSyncScheme, {"sync": True}),
    ("single", MultiProcessWeightSyncScheme, {"sync": False, "wire": "bfloat16"}),
    ("single", SharedMemWeightSyncScheme, {"sync": False, "link": LINK}),
    ("sync", SharedMemWeightSyncScheme, {"sync": False}),
    ("sync", MultiProcessWeightSyncScheme, {"sync": True}),
    ("sync", MultiProcessWeightSyncScheme, {"sync": False, "link": LINK}),
    ("sync", SharedMemWeightSyncScheme, {"sync": True, "link": LINK}),
]


def frames(batch):
    """Version and weights of the frames."""
    mask = batch["collector", "mask"]
    return batch["policy_version"][mask], batch["weights"][mask]


@pytest.mark.parametrize(("kind", "scheme", "options"), CASES)
def test_every_frame_has_the_weights_of_exactly_so_many_updates_ago(kind, scheme, options):
    schemes = {"policy": scheme(lag=LAG, **options)}
    collector, _ = build(kind, "one", steps=5, weight_sync_schemes=schemes)
    with collector:
        for n in range(12):
            versions, weights = frames(collector.next())
            assert (versions == max(0, n - LAG)).all()
            assert (weights == versions).all()
            assert collector.policy_version == n
            publish(collector)
        assert all_accounted_for(collector.stats())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_workers_on_their_own_lag_at_least_so_much(scheme):
    schemes = {"policy": scheme(lag=LAG, sync=False)}
    collector, _ = build("async", "one", steps=5, weight_sync_schemes=schemes)
    newest = 0
    with collector:
        for n in range(40):
            versions, weights = frames(collector.next())
            assert (versions <= max(0, n - LAG)).all()
            assert (weights == versions).all()
            newest = max(newest, int(versions.max()))
            publish(collector)
    assert newest > 10


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_worker_that_was_restarted_has_the_same_lag(scheme):
    schemes = {"policy": scheme(lag=LAG)}
    collector, _ = build(
        "sync",
        "one",
        steps=5,
        weight_sync_schemes=schemes,
        on_worker_failure="restart",
    )
    with collector:
        for n in range(12):
            if n in (2, 7):
                os.kill(pids(collector)[1], signal.SIGKILL)
            versions, weights = frames(collector.next())
            assert (versions == max(0, n - LAG)).all()
            assert (weights == versions).all()
            publish(collector)
        assert collector.stats()["restarts"] == 2
