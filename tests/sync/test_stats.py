"""What was counted and measured of every send."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sync import Layout
from sync.channel_interface import APPLIED, JOINED, LOST, Answer
from sync.model.block import NEVER
from sync.worker_record import KEPT, SendStats, Sent, WorkerRecord, percentiles
from tests.sync.support import (
    EACH,
    in_one_thread,
    policy,
    running,
    sender,
)

TIMES = ("wake_ms", "apply_ms", "ack_ms")


@given(st.lists(st.integers(0, 10**12), min_size=1))
def test_percentiles_are_values_that_occurred_in_order(values):
    found = percentiles(values)
    assert list(found) == ["p50", "p95", "p99", "max"]
    assert all(round(ms * 1e6) in values for ms in found.values())
    assert list(found.values()) == sorted(found.values())
    assert found["max"] == max(values) / 1e6


def test_percentiles_of_a_hundred_values_are_the_ones_one_expects():
    found = percentiles([n * 1_000_000 for n in range(101)])
    assert found == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}


def test_without_values_there_are_no_percentiles():
    assert percentiles([]) == {}
    assert SendStats().summary() == {"sends": 0, "bytes": 0, "pack_ms": {}, "publish_ms": {}}


def test_packing_and_publishing_are_told_apart():
    stats = SendStats()
    stats.add(Sent(1, 8, pack_ns=1_000_000, publish_ns=2_000_000, workers=[1]))
    assert stats.summary()["pack_ms"]["p50"] == 1.0
    assert stats.summary()["publish_ms"]["p50"] == 2.0
    assert [sent["pack_ms"] for sent in stats.worker_summaries(2)] == [
        {},
        dict.fromkeys(("p50", "p95", "p99", "max"), 1.0),
    ]


def test_counts_go_on_when_old_times_are_forgotten():
    stats, worker = SendStats(), WorkerRecord(0, None)
    for number in range(KEPT + 10):
        stats.add(Sent(number, 8, pack_ns=1, publish_ns=number, workers=[0]))
        worker.book(Answer(0, APPLIED, number, retries=1))
    assert (stats.sends, stats.nbytes, len(stats.recent)) == (KEPT + 10, 8 * (KEPT + 10), KEPT)
    assert (worker.applied, worker.retries, len(worker.recent)) == (KEPT + 10, KEPT + 10, KEPT)
    assert stats.recent[0].version == worker.recent[0].version == 10
    assert [answer.version for answer in worker.since(KEPT + 7)] == [KEPT + 9, KEPT + 8]


def test_a_process_that_takes_a_place_has_acknowledged_nothing():
    record = WorkerRecord(0, None)
    record.book(Answer(0, JOINED, pid=1))
    record.addressed = 3
    record.book(Answer(0, APPLIED, 3))
    assert (record.acknowledged, record.waiting, record.restarts) == (3, False, 0)
    record.book(Answer(0, LOST))
    record.book(Answer(0, JOINED, pid=2))
    assert (record.acknowledged, record.waiting, record.restarts) == (NEVER, True, 1)
    assert (record.connected, record.failure, record.pid) == (False, None, 2)


def counts(scheme, worker=0):
    stats = scheme.stats["workers"][worker]
    return {name: stats[name] for name in COUNTS}


COUNTS = ("addressed", "applied", "coalesced", "failures", "restarts")


def counted(*numbers):
    return dict(zip(COUNTS, numbers, strict=True))


@EACH
def test_sends_and_bytes_are_counted(kind):
    model = policy(1)
    layout = Layout.of(dict(model.state_dict()))
    with running(scheme := sender(kind, model, workers=2), background=True):
        for _ in range(4):
            scheme.send()
        stats = scheme.stats
        assert (stats["version"], stats["sends"], stats["bytes"]) == (4, 5, 5 * layout.nbytes)
        assert list(stats["workers"]) == [0, 1]


@EACH
def test_bytes_and_times_of_sends_are_those_of_the_workers_they_went_to(kind):
    scheme = sender(kind, workers=3, per_worker_weights=True)
    nbytes = Layout.of(dict(policy(1).state_dict())).nbytes
    with running(scheme, background=True):
        for chosen in ([0], [0, 2], None):
            scheme.send(worker_ids=chosen)
        own = {0: policy(2), 2: policy(3)}
        scheme.send(own)
        sent = [scheme.send_stats.recent[i] for i in (-2, -1)]
        assert [list(part.workers) for part in sent] == [[0], [2]]
        workers = scheme.stats["workers"]
        assert [worker["bytes"] for worker in workers.values()] == [n * nbytes for n in (5, 2, 4)]
        for worker, stats in workers.items():
            for name, field in (("pack_ms", "pack_ns"), ("publish_ms", "publish_ns")):
                mine = [s for s in scheme.send_stats.recent if worker in s.workers]
                assert stats[name] == percentiles([getattr(s, field) for s in mine])


@EACH
def test_a_version_is_not_seen_before_it_was_published(kind, monkeypatch):
    with in_one_thread(scheme := sender(kind)) as (receiver,):
        channel = receiver._receiver.channel
        take = channel.take

        def publish_and_take():  # the worker has looked at the clock, and not yet at the channel
            scheme.send_async()
            return take()

        monkeypatch.setattr(channel, "take", publish_and_take)
        receiver.receive()
        monkeypatch.undo()
        scheme.wait_async()
        assert scheme.worker(0).recent[-1].wake_ns >= 0


@EACH
def test_recorded_times_are_ordered_and_not_negative(kind):
    with running(scheme := sender(kind, workers=2), background=True):
        for _ in range(20):
            scheme.send()
        recent = scheme.worker(0).recent
        assert [applied.version for applied in recent] == list(range(21))
        for applied in recent:
            assert 0 <= applied.wake_ns <= applied.acknowledge_ns
            assert applied.apply_ns >= 0
            assert applied.wake_ns + applied.apply_ns == applied.acknowledge_ns
            assert applied.retries >= 0
        stats = scheme.stats
        for name in ("pack_ms", "publish_ms"):
            assert 0 <= stats[name]["p50"] <= stats[name]["max"]
        for worker in stats["workers"].values():
            for name in TIMES:
                assert 0 <= worker[name]["p50"] <= worker[name]["p99"] <= worker[name]["max"]
