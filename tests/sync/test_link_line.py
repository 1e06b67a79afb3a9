"""One line of a link, on a clock of the test's own: when what arrives, and what does not."""

from __future__ import annotations

import pytest
import torch

from sync import Layout, Link
from sync.link import WINDOW, Line, Outbox

MS = 1_000_000
LAYOUT = Layout.of({"weight": torch.zeros(1000)})


class Clock:
    """Time that passes when the test says so, in nanoseconds."""

    def __init__(self):
        self.now = 10**12

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("sync.link.now_ns", clock)
    return clock


class End:
    """A line with its outbox, to which versions are posted."""

    def __init__(self, link, clock, worker=0):
        self.outbox, self.clock = Outbox(LAYOUT), clock
        self.line = Line(link, worker, self.outbox)
        self.begun = clock.now
        self.arrivals = []

    def post(self, version):
        number = self.outbox.free(self.line.held)
        block = self.outbox[number]
        block.stamp(version, b"")
        self.line.post(number, version)
        self.look()

    def look(self):
        while (parcel := self.line.arrived(self.clock.now)) is not None:
            assert self.outbox[parcel.number].version == parcel.version
            self.arrivals.append((parcel.version, (parcel.arrives_ns - self.begun) / MS))
            self.line.drop(parcel)

    def run(self):
        """Let time pass until nothing is left to happen."""
        while self.line.num_in_flight:
            self.clock.now = max(self.clock.now, self.line.due_ns)
            self.look()
        return self.arrivals


def test_a_version_takes_the_time_of_its_bytes_and_the_latency(clock):
    end = End(Link(latency_ms=20, bandwidth_mbps=8), clock)  # a thousand bytes a millisecond
    end.post(0)
    assert end.run() == [(0, pytest.approx(LAYOUT.nbytes / 1000 + 20))]


def test_many_versions_are_in_flight_where_only_the_way_is_long(clock):
    end = End(Link(latency_ms=100), clock)
    for version in range(10):
        end.post(version)
        clock.now += MS
    assert end.line.num_in_flight == 10
    assert end.run() == [(version, pytest.approx(100 + version)) for version in range(10)]


def test_no_more_than_a_window_is_in_flight_and_the_newest_comes_last(clock):
    end = End(Link(latency_ms=100), clock)
    for version in range(WINDOW + 10):
        end.post(version)
    assert len(end.line.flying) == WINDOW
    assert [version for version, _ in end.run()] == [*range(WINDOW), WINDOW + 9]
    assert end.line.coalesced == 9


def test_one_waits_for_the_wire_and_newer_ones_take_its_place(clock):
    end = End(Link(bandwidth_mbps=0.008), clock)  # a byte a millisecond
    for version in range(5):
        end.post(version)
    assert [version for version, _ in end.run()] == [0, 4]
    assert end.arrivals[1][1] == pytest.approx(2 * end.arrivals[0][1])
    assert (end.line.sent, end.line.coalesced) == (2, 3)


def test_jitter_delays_and_never_reorders(clock):
    end = End(Link(latency_ms=10, jitter_ms=50), clock)
    for version in range(60):
        end.post(version)
        clock.now += MS
    arrivals = end.run()
    assert [version for version, _ in arrivals] == list(range(60))
    delays = [at - version for version, at in arrivals]
    assert all(10 <= delay <= 61 for delay in delays)
    assert max(delays) - min(delays) > 10


def test_the_same_seed_gives_the_same_delays_and_each_worker_has_its_own(clock):
    def arrivals(seed, worker):
        end = End(Link(jitter_ms=50, loss=0.3, seed=seed), clock, worker)
        for version in range(20):
            end.post(version)
            clock.now += MS
        return end.run()

    assert arrivals(1, 0) == arrivals(1, 0)
    assert arrivals(1, 0) != arrivals(2, 0)
    assert arrivals(1, 0) != arrivals(1, 1)


def test_what_is_lost_comes_round_trips_later_and_takes_the_wire_again(clock):
    end = End(Link(latency_ms=10, bandwidth_mbps=8, loss=0.8), clock)
    end.post(0)
    ((_, at),) = end.run()
    first = LAYOUT.nbytes / 1000
    packets = -(-LAYOUT.nbytes // 1500)
    again = first * end.line.retransmitted / packets
    assert end.line.retransmitted > 0
    assert (at - first - again - 10) % 20 == pytest.approx(0, abs=1e-3)
    assert at >= first + 30


def test_an_answer_is_heard_one_latency_later(clock):
    end, heard = End(Link(latency_ms=10, jitter_ms=90), clock), []
    end.line.answer(clock.now, lambda: heard.append("first"))
    clock.now += 5 * MS
    end.line.answer(clock.now, lambda: heard.append("second"))
    for _ in range(20):
        end.line.heard(clock.now)
        expected = (clock.now - end.begun >= 10 * MS) + (clock.now - end.begun >= 15 * MS)
        assert heard == ["first", "second"][:expected]
        clock.now += MS


def test_a_new_connection_drops_what_was_on_the_old_one(clock):
    end, heard = End(Link(latency_ms=10), clock), []
    end.post(0)
    end.line.answer(clock.now, lambda: heard.append("old"))
    end.line.cut()
    assert end.line.again()
    assert [version for version, _ in end.run()] == [0]
    clock.now += 100 * MS
    end.line.heard(clock.now)
    assert heard == []


def test_memory_is_used_again_when_a_version_has_arrived(clock):
    end = End(Link(latency_ms=10), clock)
    for version in range(50):
        end.post(version)
        end.run()
    assert len(end.outbox._blocks) <= 2
