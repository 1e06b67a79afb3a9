"""Exact lag: which version a worker has, by every mechanism, and how lags are drawn."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from sync import (
    Lag,
    Layout,
    Link,
    SharedMemWeightSyncScheme,
    WorkerDied,
)
from sync.effects.pipeline import Parcel, Pipeline
from tests.sync.effects.fakes import FakeSender
from tests.sync.support import (
    KINDS,
    bits,
    fill,
    held,
    policy,
    running,
    sender,
)
from tests.sync.support import version as version_of

LAG = 3


def lagging(model, *, kind="shared_copy", workers=1, lag=LAG, **options):
    return sender(kind, model, workers, lag=lag, **options)


def take(scheme, model, version):
    """Wait for a version, and take what else there is; the version in use and the model's bits."""
    while scheme.version < version:
        assert scheme.receive(20.0) is not None
    while scheme.receive() is not None:
        pass
    return scheme.version, bits(model)


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        ("shared_copy", None),
        ("shared_zero_copy", None),
        ("multiprocess", Link(latency_ms=2, jitter_ms=2)),
    ],
    ids=str,
)
def test_a_blocking_send_waits_for_the_version_that_is_delivered(kind, link):
    model = policy(0)
    with running(scheme := lagging(model, kind=kind, link=link), background=True) as (worker,):
        for n in range(1, 8):
            scheme.send(fill(model, n))
            assert scheme.acknowledged == {0: max(0, n - LAG)}
            assert worker.do(held) == bits(policy(max(0, n - LAG)))


def test_no_lag_is_no_effect():
    for lag in (None, 0, Lag(), Lag("cycle", values=(0, 0)), Lag("uniform")):
        with lagging(policy(0), lag=lag) as scheme:
            assert scheme.lag is None
            assert scheme._sender.pipeline.is_direct
            assert scheme.history == 0


def test_a_worker_that_died_fails_the_send_that_would_have_reached_it():
    model = policy(0)
    with running(scheme := lagging(model, lag=2), background=True, method="fork") as (worker,):
        scheme.send(fill(model, 1))
        worker.die()
        scheme.send(fill(model, 2))  # nothing is due
        with pytest.raises(WorkerDied):
            scheme.send(fill(model, 3))


def test_if_the_weights_of_one_worker_are_refused_no_worker_gets_any():
    scheme = SharedMemWeightSyncScheme(lag=1, per_worker_weights=True, sync=False)
    scheme.init_on_sender(params_map={0: policy(0), 1: policy(100)})
    bad = policy(9)
    bad[0].weight.data[0] = float("inf")
    with running(scheme) as workers:
        scheme.send({0: policy(1), 1: policy(101)})
        with pytest.raises(ValueError, match="infinite"):
            scheme.send({0: policy(8), 1: bad})
        scheme.send({1: policy(102)})  # worker 0 was sent no version 2
        scheme.send({0: policy(3), 1: policy(103)})
        assert scheme.version == 3
        assert workers[0].do(take, 1) == (1, bits(policy(1)))
        assert workers[1].do(take, 2) == (2, bits(policy(102)))


def test_a_version_that_its_wire_refuses_late_is_left_out():
    model = nn.Linear(2, 2)
    scheme = lagging(model, lag=2, sync=False, wire="float16")
    with running(scheme, lambda: nn.Linear(2, 2)) as (worker,):
        scheme.send(fill(model, 1))
        scheme.send(fill(model, 1e6))
        scheme.send(fill(model, 3))
        with pytest.raises(ValueError, match="too large for wire=float16"):
            scheme.send(fill(model, 4))
        assert scheme.version == 3
        for n in (4, 5):
            scheme.send(fill(model, n))
        assert worker.do(take, 3)[0] == 3


def test_a_version_is_delivered_once_and_kept_no_longer():
    layout = Layout.of({"a": torch.ones(3)})
    pipeline = Pipeline(FakeSender(layout, 1), layout, lag=Lag("cycle", values=(0, 1)))
    delivered, kept = [], []
    for version in range(6):
        taken = pipeline.taken([])
        block = pipeline.free_block(taken)
        block.stamp(version, b"")
        outgoing = pipeline.prepare([Parcel(block, [0])], taken)
        delivered.append([one.block.version for one in outgoing])
        kept.append([block.version for block in pipeline.taken([])])
    assert delivered == [[0], [], [2], [], [4], []]  # the worker has what it would get again
    assert kept == [[], [1], [], [3], [], [5]]


def test_memory_is_bounded_by_the_largest_lag():
    model = policy(0)
    with running(scheme := lagging(model, lag=Lag("uniform", low=0, high=5), workers=2)) as _:
        for n in range(1, 40):
            scheme.send_async(fill(model, n))
        assert len(scheme._sender.pipeline._pool) <= 5 + 4


# -- the draws


def draws(lag, count=8_000):
    return [lag.draw(version, worker=0) for version in range(count)]


@pytest.mark.parametrize(
    ("lag", "expected"),
    [
        (Lag("uniform", low=1, high=4), dict.fromkeys(range(1, 5), 1 / 4)),
        (Lag("two_point", low=1, high=6, share=0.2), {1: 0.8, 6: 0.2}),
        (Lag("cycle", values=(0, 2, 2, 5)), {0: 0.25, 2: 0.5, 5: 0.25}),
        (
            Lag("geometric", mean=1.0, most=3),
            {0: 1 / 2, 1: 1 / 4, 2: 1 / 8, 3: 1 / 8},
        ),
    ],
)
def test_each_lag_is_drawn_as_often_as_it_should_be(lag, expected):
    found = draws(lag)
    assert found[:500] == draws(lag, 500)
    counts = Counter(found)
    assert set(counts) == set(expected)
    for k, share in expected.items():
        assert counts[k] / len(found) == pytest.approx(share, abs=0.012)
    assert lag.smallest == min(expected)
    assert lag.largest == max(expected)


def test_the_mean_of_a_geometric_lag_is_the_given_one():
    lag = Lag("geometric", mean=3.0)
    assert lag.largest == 24
    found = draws(lag, 20_000)
    assert sum(found) / len(found) == pytest.approx(3.0, abs=0.1)


def test_draws_depend_on_seed_and_version_or_worker_and_on_nothing_else():
    by_version = Lag("uniform", high=100)
    torch.manual_seed(1)
    first = [by_version.draw(version, worker=3) for version in range(50)]
    torch.manual_seed(2)
    again = [by_version.draw(version, worker=0) for version in reversed(range(50))]
    assert first == again[::-1]
    other = Lag("uniform", high=100, seed=1)
    assert [other.draw(version, 0) for version in range(50)] != first
    by_worker = Lag("uniform", high=100, per="worker")
    found = {w: {by_worker.draw(v, w) for v in range(20)} for w in range(20)}
    assert all(len(lags) == 1 for lags in found.values())
    assert len(set(itertools.chain(*found.values()))) > 10


def test_draws_go_on_from_the_first_version():
    model, lag = policy(0), Lag("cycle", values=(0, 2, 1))
    scheme = KINDS["shared_copy"](lag=lag, sync=False)
    scheme.first_version = 7
    scheme.init_on_sender(model=model, devices=["cpu"])
    with running(scheme) as (worker,):
        newest = 0
        for n in range(1, 8):
            scheme.send(fill(model, n))
            newest = max(newest, n - lag.draw(7 + n, 0))
            assert worker.do(take, newest)[0] == worker.do(version_of) == newest
