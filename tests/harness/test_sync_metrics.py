from __future__ import annotations

import copy
import threading

import pytest
from torch import nn

from harness.sync_metrics import SyncMeter
from sync import NoWeightSyncScheme, SharedMemWeightSyncScheme


@pytest.fixture
def ends():
    """A scheme whose one worker is in this process: the sender, and the receiver."""
    model = nn.Linear(2, 2)
    with SharedMemWeightSyncScheme() as sender:
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
    metrics, histograms = meter.read()
    assert set(metrics) == {"sync/publish_ms", "sync/ack_ms", "sync/apply_ms"}
    assert all(value > 0 for value in metrics.values())
    assert sum(histograms["histogram/ack_ms"].counts) == 2
    assert meter.read() == ({}, {})


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


def test_without_synchronisation_there_is_nothing_but_the_publishing():
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender(model=nn.Linear(1, 1), devices=["cpu"])
    meter = SyncMeter(scheme, 1)
    with meter.publishing():
        scheme.send()
    assert set(meter.read()[0]) == {"sync/publish_ms"}
    assert meter.num_bytes == 0
    assert meter.summary()["workers"] == {}
