"""The link to one worker, on a clock of the test's own: what arrives, and when."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from sync import Layout, Link
from sync.channel_interface import APPLIED, FAILED, JOINED, Answer
from sync.effects.slow_link import WINDOW, SlowLinkSender, WorkerLink
from tests.sync.effects.fakes import FakeReceiver, FakeSender

MS = 1_000_000
LAYOUT = Layout.of({"weight": torch.zeros(1000)})


class Sending:
    """A link without a worker: versions are sent, and arrive."""

    def __init__(self, link, clock, worker=0):
        self.channel = SlowLinkSender(FakeSender(LAYOUT, worker + 1), link)
        self.link, self.worker, self.clock = self.channel.links[worker], worker, clock
        self.begun = clock.now
        self.link.reset(connected=True)
        self.arrivals = []

    def send(self, version):
        block = self.channel.free_block([])
        block.stamp(version, b"")
        self.link.send(block)
        self.look()

    def look(self):
        for message in self.link.arrived(self.clock.now):
            self.arrivals.append((message.block.version, (message.arrives_ns - self.begun) / MS))

    def run(self):
        """Let time pass until nothing is left to happen."""
        while self.link.num_in_flight:
            self.clock.now = max(self.clock.now, self.link.due_ns)
            self.look()
        return self.arrivals


def test_a_version_takes_the_time_of_its_bytes_and_the_latency(clock):
    sending = Sending(
        Link(latency_ms=20, bandwidth_mbps=8), clock
    )  # a thousand bytes a millisecond
    sending.send(0)
    assert sending.run() == [(0, pytest.approx(LAYOUT.nbytes / 1000 + 20))]


def test_many_versions_are_in_flight_if_only_the_latency_is_high(clock):
    sending = Sending(Link(latency_ms=100), clock)
    for version in range(10):
        sending.send(version)
        clock.now += MS
    assert sending.link.num_in_flight == 10
    assert sending.run() == [(version, pytest.approx(100 + version)) for version in range(10)]


def test_no_more_than_a_window_is_in_flight_and_the_newest_comes_last(clock):
    sending = Sending(Link(latency_ms=100), clock)
    for version in range(WINDOW + 10):
        sending.send(version)
    assert len(sending.link._in_flight) == WINDOW
    assert [version for version, _ in sending.run()] == [*range(WINDOW), WINDOW + 9]
    assert sending.link.coalesced == 9


def test_one_version_waits_for_the_link_and_a_newer_one_replaces_it(clock):
    sending = Sending(Link(bandwidth_mbps=0.008), clock)  # a byte a millisecond
    for version in range(5):
        sending.send(version)
    assert [version for version, _ in sending.run()] == [0, 4]
    assert sending.arrivals[1][1] == pytest.approx(2 * sending.arrivals[0][1])
    assert (sending.link.sent, sending.link.coalesced) == (2, 3)


def test_jitter_delays_and_never_reorders(clock):
    sending = Sending(Link(latency_ms=10, jitter_ms=50), clock)
    for version in range(60):
        sending.send(version)
        clock.now += MS
    arrivals = sending.run()
    assert [version for version, _ in arrivals] == list(range(60))
    delays = [at - version for version, at in arrivals]
    assert all(10 <= delay <= 61 for delay in delays)
    assert max(delays) - min(delays) > 10


def test_the_same_seed_gives_the_same_delays_and_each_worker_has_its_own(clock):
    def arrivals(seed, worker):
        sending = Sending(Link(jitter_ms=50, loss=0.3, seed=seed), clock, worker)
        for version in range(20):
            sending.send(version)
            clock.now += MS
        return sending.run()

    assert arrivals(1, 0) == arrivals(1, 0)
    assert arrivals(1, 0) != arrivals(2, 0)
    assert arrivals(1, 0) != arrivals(1, 1)


def test_lost_packets_arrive_round_trips_later_and_are_transmitted_again(clock):
    sending = Sending(Link(latency_ms=10, bandwidth_mbps=8, loss=0.8), clock)
    sending.send(0)
    ((_, at),) = sending.run()
    first = LAYOUT.nbytes / 1000
    packets = -(-LAYOUT.nbytes // 1500)
    again = first * sending.link.retransmitted / packets
    assert sending.link.retransmitted > 0
    assert (at - first - again - 10) % 20 == pytest.approx(0, abs=1e-3)
    assert at >= first + 30


def test_an_answer_is_heard_one_latency_after_it_was_given(clock):
    sending, heard = Sending(Link(latency_ms=10, jitter_ms=90), clock), []
    said = sending.channel.inner.said
    said.append(Answer(0, APPLIED, 1, applied_ns=clock.now))
    sending.channel.poll()
    clock.now += 5 * MS
    said.append(Answer(0, FAILED, 2, text="no"))
    for _ in range(20):
        heard += sending.channel.poll()
        expected = (clock.now - sending.begun >= 10 * MS) + (clock.now - sending.begun >= 15 * MS)
        assert [answer.version for answer in heard] == [1, 2][:expected]
        clock.now += MS
    assert [answer.return_ns for answer in heard] == [10 * MS, 10 * MS]
    assert heard[0].applied_ns == sending.begun


def test_a_new_connection_drops_what_was_on_the_old_one(clock):
    sending = Sending(Link(latency_ms=10), clock)
    sending.send(0)
    sending.channel.inner.said.append(Answer(0, APPLIED, 0, applied_ns=clock.now))
    assert sending.channel.poll() == []
    FakeReceiver(sending.channel.inner, 0).open()
    assert [answer.kind for answer in sending.channel.poll()] == [JOINED]
    sending.send(1)
    assert [version for version, _ in sending.run()] == [1]
    clock.now += 100 * MS
    assert sending.channel.poll() == []


def test_versions_are_sent_only_while_a_worker_is_connected(clock):
    sending = Sending(Link(latency_ms=10), clock)
    sending.link.reset(connected=False)
    sending.send(0)
    assert sending.run() == []
    FakeReceiver(sending.channel.inner, 0).open()
    sending.channel.poll()
    sending.send(1)
    assert [version for version, _ in sending.run()] == [1]
    assert (sending.link.sent, sending.link.delivered) == (1, 1)


def test_a_link_keeps_the_time_of_the_clock_that_it_is_given():
    class Block(NamedTuple):
        nbytes: int

    now = 0
    link = WorkerLink(Link(latency_ms=20, bandwidth_mbps=8), 0, clock=lambda: now)
    link.reset(connected=True)
    link.send(Block(5_000))
    assert link.due_ns == 25 * MS
    now = 25 * MS
    assert [message.block for message in link.arrived(now)] == [Block(5_000)]
    assert link.summary()["delay_ms"]["p50"] == 25


def test_memory_is_used_again_when_a_version_has_arrived(clock):
    sending = Sending(Link(latency_ms=10), clock)
    for version in range(50):
        sending.send(version)
        sending.run()
    assert len(sending.channel._pool) <= 2


def test_a_transmission_takes_its_bits_over_the_bandwidth():
    link = WorkerLink(Link(latency_ms=1, bandwidth_mbps=100), 0)
    assert link._durations(1_000_000) == (80_000_000, 0)
    assert WorkerLink(Link(latency_ms=1), 0)._durations(1_000_000) == (0, 0)
