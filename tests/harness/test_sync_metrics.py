from __future__ import annotations

import copy
import gc
import threading
import tracemalloc
from collections import deque
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.measures.meters import split
from harness.measures.sync_meter import SyncMeter
from harness.run.build import make_scheme
from sync import HogwildWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from sync.worker_record import KEPT
from tests.harness.config.composed import config_of


@pytest.fixture(params=["float32"])
def ends(request):
    """A scheme whose one worker is in this process: the sender, and the receiver."""
    with both_ends(SharedMemWeightSyncScheme(wire=request.param)) as (sender, receiver):
        yield sender, receiver


@contextmanager
def both_ends(scheme):
    model = nn.Linear(2, 2)
    with scheme as sender:
        sender.init_on_sender(model=model, devices=["cpu"])
        receiver = copy.deepcopy(sender)
        receiver.init_on_receiver(model=copy.deepcopy(model), worker_idx=0)
        meet(sender, receiver)
        yield sender, receiver
        receiver.shutdown()


def meet(sender, receiver):
    thread = threading.Thread(target=receiver.connect, kwargs={"background": False})
    thread.start()
    sender.connect()
    thread.join()


def publish(meter, sender, receiver):
    with meter.publishing():
        sender.send_async()
    receiver.receive()
    sender.wait_async()


def test_a_reading_holds_what_is_new(ends):
    meter = SyncMeter(ends[0], 1)
    meter.read()  # what connecting cost
    publish(meter, *ends)
    publish(meter, *ends)
    metrics, histograms = split(meter.read())
    assert set(metrics) == {"sync/publish_ms", "sync/ack_ms", "sync/apply_ms"}
    assert all(value > 0 for value in metrics.values())
    assert sum(histograms["histogram/ack_ms"].counts) == 2
    assert meter.read() == {}


def test_times_are_milliseconds_of_what_workers_answered(ends):
    meter = SyncMeter(ends[0], 1)
    for _ in range(3):
        publish(meter, *ends)
    answers = [answer for _, answer in meter.answers_since({})]
    metrics, _ = split(meter.read())
    for name in ("ack", "apply"):
        of_name = "acknowledge_ns" if name == "ack" else "apply_ns"
        expected = sum(getattr(answer, of_name) for answer in answers) / len(answers) / 1e6
        assert metrics[f"sync/{name}_ms"] == pytest.approx(expected)


def test_links_and_errors_are_means_of_what_is_new(ends):
    meter = SyncMeter(ends[0], 1)
    first = SimpleNamespace(
        delivered=2, delays_ns=deque([4e6, 9e6]), num_in_flight=1, coalesced=2, retransmitted=3
    )
    meter._scheme = SimpleNamespace(links={0: first}, send_stats=SimpleNamespace(saved_bytes=5))
    meter._fresh_errors = [(0.1, 2.0), (0.4, 1.0)]
    assert meter._read_link() == {
        "sync/link_delay_ms": pytest.approx(6.5),
        "sync/link_in_flight": 1,
        "sync/link_coalesced": 2,
        "sync/link_retransmitted": 3,
    }
    assert meter._read_wire() == {
        "sync/wire_error": pytest.approx(0.25),
        "sync/wire_error_max": 2.0,
        "sync/bytes_saved": 5.0,
    }
    first.delivered, first.delays_ns = 3, deque([4e6, 9e6, 1e6])
    assert meter._read_link()["sync/link_delay_ms"] == pytest.approx(1.0)
    assert meter._read_wire() == {}
    meter._scheme.links = {}
    assert meter._read_link() == {}


def test_bytes_are_those_of_all_publications(ends):
    meter = SyncMeter(ends[0], 1)
    assert meter.num_bytes == 0
    publish(meter, *ends)
    once = meter.num_bytes
    publish(meter, *ends)
    assert meter.num_bytes == 2 * once > 0


def test_the_summary_has_percentiles_and_each_workers_versions(ends):
    meter = SyncMeter(ends[0], 1)
    publish(meter, *ends)
    summary = meter.summary()
    for name in ("publish", "ack", "apply"):
        values = [summary[f"sync/{name}_ms_{p}"] for p in ("p50", "p95", "p99")]
        assert values == sorted(values)
    assert summary["workers"]["0"]["published"] == summary["workers"]["0"]["acknowledged"] == 1


@pytest.mark.parametrize("ends", ["int8"], indirect=True)
def test_the_summary_of_a_resumed_run_counts_all_of_it_and_has_the_errors_of_its_part(ends):
    meter = SyncMeter(ends[0], 1)
    state = {"publishes": 10, "bytes": 1000, "saved_bytes": 500, "fresh_errors": []}
    meter.load_state_dict(state)  # as a checkpoint says
    publish(meter, *ends)
    summary, [(error, _)] = meter.summary(), meter._fresh_errors
    assert summary["sync/sends"] == 11
    assert summary["sync/bytes"] == meter.num_bytes > 1000
    assert summary["sync/bytes_saved"] >= 500
    assert summary["sync/wire_error"] == error > 0


@pytest.mark.parametrize("ends", ["int8"], indirect=True)  # of whose errors more is kept
def test_what_is_kept_does_not_grow_with_the_run(ends):
    meter = SyncMeter(ends[0], 1)

    def publish_many(count):
        for number in range(count):
            publish(meter, *ends)
            if number % 50 == 0:
                meter.read()

    tracemalloc.start()
    try:
        publish_many(KEPT + 100)
        gc.collect()  # what earlier tests left does not count
        sizes = [tracemalloc.get_traced_memory()[0]]
        for _ in range(3):  # something else of the process may grow meanwhile, but not each time
            publish_many(1_000)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        assert min(after - before for before, after in pairwise(sizes)) < 20_000
    finally:
        tracemalloc.stop()


def test_without_synchronisation_there_is_nothing_but_the_publishing():
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender(model=nn.Linear(1, 1), devices=["cpu"])
    meter = SyncMeter(scheme, 1)
    with meter.publishing():
        scheme.send()
    assert set(split(meter.read())[0]) == {"sync/publish_ms"}
    assert meter.num_bytes == 0
    assert meter.summary()["workers"] == {}


def test_verified_policy_calls_are_counted_where_that_is_asked_for():
    for verify, counts in {"off": {}, "every": {"sync/verified_calls": 3}}.items():
        options = ["sync=multiprocess", f"sync.verify={verify}"]
        with both_ends(make_scheme(config_of(*options))) as (sender, receiver):
            meter = SyncMeter(sender, 1)
            act = receiver.watched(sender.model)
            for _ in range(3):
                act(torch.ones(1, 2))
            publish(meter, sender, receiver)
            found = split(meter.read())[0], meter.summary()
            for metrics in found:
                assert {k: v for k, v in metrics.items() if k == "sync/verified_calls"} == counts


def test_torn_policy_calls_are_counted():
    with both_ends(HogwildWeightSyncScheme(check_every=1)) as (sender, receiver):
        meter = SyncMeter(sender, 1)

        @torch.no_grad()
        def step_if_told(told):
            sender.model.weight.add_(told)

        act = receiver.watched(step_if_told)
        for told in (0, 1, 0):
            act(told)
        counts = {"sync/checked_calls": 3, "sync/torn_calls": 1, "sync/tear_rate": 1 / 3}
        assert split(meter.read())[0].items() >= counts.items()
        summary = meter.summary()
        assert summary.items() >= counts.items()
        assert summary["workers"]["0"]["torn"] == sender.torn == receiver.torn
