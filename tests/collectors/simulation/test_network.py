"""When a version is there: ports shared by many workers, stars, trees."""

from __future__ import annotations

import math

import pytest

from collectors.simulation.network import Network, Transfers, Version
from collectors.simulation.simulated_pool import VirtualClock
from sync import Link

MBPS = 8.0  # a thousand bytes a millisecond


class Sending:
    """Versions of 10,000 bytes, which take 10 ms at a port, and their arrivals."""

    def __init__(self, network, num_workers, link=None):
        self.clock, self.arrived, self.num_workers = VirtualClock(), {}, num_workers
        self.transfers = Transfers(network, link, num_workers, self.clock, self._arrive)

    def _arrive(self, worker, version):
        self.arrived.setdefault(worker, []).append((version, self.clock.now / 1e6))

    def publish(self, number, at_ms=0.0, workers=None):
        self.clock.advance(round(at_ms * 1e6) - self.clock.now)
        named = range(self.num_workers) if workers is None else workers
        self.transfers.publish(Version(number, 10_000), named)

    def times(self):
        """When each worker had its only version."""
        self.clock.advance(10**12)
        return [self.arrived[worker][0][1] for worker in range(self.num_workers)]


def test_without_limits_a_version_is_there_at_once():
    sending = Sending(Network(), 3)
    sending.publish(1)
    assert sending.times() == [0, 0, 0]


def test_a_star_sends_to_one_worker_after_another():
    sending = Sending(Network(MBPS), 8)
    sending.publish(1)
    assert sending.times() == [10.0 * (worker + 1) for worker in range(8)]


@pytest.mark.parametrize("fan_out", [1, 2, 3])
def test_in_a_tree_workers_forward(fan_out):
    sending = Sending(Network(MBPS, "tree", fan_out), 40)
    sending.publish(1)

    def expected(worker):  # its sender has it, and transmits to the siblings before it first
        sender, place = worker // fan_out - 1, worker % fan_out
        return (0 if sender < 0 else expected(sender)) + 10.0 * (place + 1)

    assert sending.times() == [expected(worker) for worker in range(40)]


def test_a_tree_beats_a_star_with_many_workers():
    star, tree = Sending(Network(MBPS), 62), Sending(Network(MBPS, "tree", 2), 62)
    for sending in (star, tree):
        sending.publish(1)
    assert max(star.times()) == 620
    assert max(tree.times()) == 100  # five levels, two transmissions each


def test_a_version_takes_a_link_at_each_hop():
    link = Link(latency_ms=5, bandwidth_mbps=2 * MBPS)  # 5 ms for the bytes, 5 for the way
    sending = Sending(Network(MBPS, "tree", 1), 3, link)
    sending.publish(1)
    assert sending.times() == [20, 40, 60]
    sending = Sending(Network(), 3, link)
    sending.publish(1)
    assert sending.times() == [10, 10, 10]


def test_a_newer_version_replaces_the_one_that_waits_for_a_busy_port():
    sending = Sending(Network(MBPS), 3)
    sending.publish(1)
    sending.publish(2, at_ms=12)  # on the way to worker 1
    sending.clock.advance(10**12)
    assert sending.arrived == {0: [(1, 10), (2, 40)], 1: [(1, 20), (2, 50)], 2: [(2, 30)]}


def test_a_star_sends_to_those_who_are_named():
    sending = Sending(Network(MBPS), 3)
    sending.publish(1, workers=[2])
    sending.clock.advance(10**12)
    assert sending.arrived == {2: [(1, 10)]}


def test_a_tree_cannot_send_to_some():
    sending = Sending(Network(topology="tree"), 3)
    with pytest.raises(ValueError, match="all workers"):
        sending.publish(1, workers=[2])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"port_mbps": 0.0}, "port_mbps"),
        ({"port_mbps": math.inf}, "port_mbps"),
        ({"topology": "ring"}, "one of 'star', 'tree'"),
        ({"fan_out": 0}, "fan_out"),
    ],
)
def test_impossible_networks_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        Network(**options)
