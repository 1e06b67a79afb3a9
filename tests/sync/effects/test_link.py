"""A link delays what is sent as a network would, and changes nothing else about it."""

from __future__ import annotations

import os
import threading
import time

import pytest
from torch import nn

from sync import (
    Link,
    WorkerDied,
)
from tests.sync.support import (
    bits,
    held,
    policy,
    receive,
    running,
    sender,
)

# A link is the same for every mechanism: most tests need one.
ONE = pytest.mark.parametrize("kind", ["shared_zero_copy"])
OTHER = pytest.mark.parametrize("kind", ["multiprocess"])


def linked(kind, link, workers=1, model=None, **options):
    return sender(kind, model or policy(0), workers, link=link, **options)


def link_stats(scheme, worker=0):
    return scheme.stats["workers"][worker]["link"]


@ONE
def test_a_blocking_send_takes_the_latency_of_both_directions(kind):
    with running(scheme := linked(kind, Link(latency_ms=30)), background=True) as (worker,):
        for value in (1, 2):
            begun = time.perf_counter()
            scheme.send(policy(value))
            assert time.perf_counter() - begun >= 0.060
            assert worker.do(held) == bits(policy(value))
            assert scheme.acknowledged == {0: value}


@ONE
def test_waiting_ends_at_once_when_a_worker_dies_with_weights_on_the_way(kind):
    scheme = linked(kind, Link(latency_ms=100), workers=2, timeout=30)
    with running(scheme, method="fork") as (first, second):
        scheme.send_async(policy(1))
        second.tell(lambda s, m: os._exit(1))
        os.waitid(os.P_PID, second.process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(WorkerDied, match="worker 1"):
            scheme.send(policy(2), worker_ids=[1])
        assert first.do(receive, 20)


@ONE
def test_shutting_down_waits_for_nothing_in_flight(kind):
    scheme = linked(kind, Link(latency_ms=500))
    with running(scheme):
        scheme.send_async(policy(1))
        assert link_stats(scheme)["in_flight"] == 1
        scheme.shutdown()
        assert "lockstep-send" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("kind", "wire"),
    [("multiprocess", "int8"), ("shared_copy", "bfloat16")],
)
def test_fewer_bytes_take_less_time_on_a_narrow_link(kind, wire):
    narrow = Link(bandwidth_mbps=2)
    found = {}
    for name in ("float32", wire):
        model = nn.Linear(64, 64)
        scheme = linked(kind, narrow, model=model, wire=name)
        with running(scheme, lambda: nn.Linear(64, 64), background=True):
            for _ in range(2):
                scheme.send()
            before = scheme.stats["bytes"]
            scheme.send()
            found[name] = scheme.stats["bytes"] - before
            assert link_stats(scheme)["delay_ms"]["max"] >= found[name] * 8 / 2e3
    assert found[wire] < 0.6 * found["float32"]


def test_a_link_that_loses_everything_is_refused():
    assert Link(loss=0.99).loss == 0.99
    with pytest.raises(ValueError, match=r"loss=1: expected a share of packets, 0 <= loss < 1"):
        Link(loss=1)


def test_without_a_link_there_is_no_thread_and_no_state():
    for given in (None, Link()):
        scheme = linked("shared_copy", given)
        with running(scheme):
            scheme.send_async(policy(1))
            assert scheme.links == {}
            assert "link" not in scheme.stats["workers"][0]
            assert "lockstep-send" not in [thread.name for thread in threading.enumerate()]


@OTHER
def test_a_worker_that_applies_a_version_and_leaves_has_applied_it(kind):
    with running(scheme := linked(kind, Link(latency_ms=50))) as (worker,):
        scheme.send_async(policy(1))
        assert worker.do(receive, 20)
        worker.do(lambda s, m: s.shutdown())
        scheme.wait_async()
        assert scheme.acknowledged == {0: 1}
        with pytest.raises(WorkerDied, match="left"):
            scheme.send(policy(2))
