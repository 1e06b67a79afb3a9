"""The network of a simulation: how a published version comes to every worker.

    star                                   tree, fan_out=2

    trainer --port--+--link 0--> worker 0  trainer --port--+--link 0--> worker 0 --port--+--> 2
                    +--link 1--> worker 1                  |                             +--> 3
                    +--link 2--> worker 2                  +--link 1--> worker 1 --port--+--> 4

A port transmits to one worker after another, each time the newest version: one that was published
while the port was busy replaces the one that waited for this worker. What has left the port goes
over the worker's own link, the same that `sync.link` emulates between real processes. In a tree
each worker's node has a port, too, and forwards a version as soon as it has arrived. Nodes go on
forwarding while their worker is down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from collectors.options.check_types import Count, Positive, check_fields
from collectors.simulation.simulated_pool import VirtualClock
from sync.effects.slow_link import Link, WorkerLink

Topology = Literal["star", "tree"]
TRAINER = -1


@dataclass(frozen=True)
class Network:
    """Who sends to whom, and how fast.

    port_mbps: what each port transmits, in megabits a second; None for no limit.
    topology: star, where the trainer sends to all workers; or tree, where workers forward.
    fan_out: to how many workers each sends in a tree.
    """

    port_mbps: Positive | None = None
    topology: Topology = "star"
    fan_out: Count = 2

    def __post_init__(self) -> None:
        check_fields(self)

    def receivers(self, sender: int, num_workers: int) -> range:
        """Whom the trainer (-1) or a worker's node sends to, if all are addressed."""
        if self.topology == "star":
            return range(num_workers if sender == TRAINER else 0)
        first = self.fan_out * (sender + 1)
        return range(min(first, num_workers), min(first + self.fan_out, num_workers))


class Version(NamedTuple):
    """A version on its way."""

    number: int
    nbytes: int


class _Port:
    """Transmits to one worker after another; for each worker only the newest version waits."""

    def __init__(self, clock: VirtualClock, mbps: float, hand_over: Callable[[int, Version], None]):
        self._clock, self._mbps, self._hand_over = clock, mbps, hand_over
        self._waiting: dict[int, Version] = {}  # by worker, the next first
        self._busy = False

    def send(self, worker: int, version: Version) -> None:
        self._waiting[worker] = version
        if not self._busy:
            self._transmit()

    def _transmit(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            worker = next(iter(self._waiting))
            version = self._waiting.pop(worker)
            end = self._clock.now + round(version.nbytes * 8e3 / self._mbps)
            self._clock.at(end, self._sent, worker, version)

    def _sent(self, worker: int, version: Version) -> None:
        self._hand_over(worker, version)
        self._transmit()


class Transfers:
    """Brings versions to workers in virtual time.

    arrive: called with a worker and a version when it is there.
    """

    def __init__(
        self,
        network: Network,
        link: Link | None,
        num_workers: int,
        clock: VirtualClock,
        arrive: Callable[[int, int], None],
    ):
        self._network, self._clock, self._arrive = network, clock, arrive
        self._num_workers = num_workers
        self._links: list[WorkerLink] = []
        if link is not None:
            self._links = [WorkerLink(link, worker, clock) for worker in range(num_workers)]
            for one in self._links:
                one.reset(connected=True)
        self.latency_ns = self._links[0].latency_ns if self._links else 0
        self._looks_at: list[int | None] = [None] * num_workers  # at a link, next
        self._ports: dict[int, _Port] = {}  # by sender

    def publish(self, version: Version, workers: Sequence[int]) -> None:
        """The trainer sends a version to these workers."""
        if self._network.topology == "tree":
            if len(workers) < self._num_workers:
                raise ValueError("topology=tree: versions go to all workers, not to some of them")
            workers = self._network.receivers(TRAINER, self._num_workers)
        self._send(TRAINER, workers, version)

    def _send(self, sender: int, workers: Sequence[int], version: Version) -> None:
        mbps = self._network.port_mbps
        if mbps is None:
            for worker in workers:
                self._over_link(worker, version)
            return
        if sender not in self._ports:
            self._ports[sender] = _Port(self._clock, mbps, self._over_link)
        for worker in workers:
            self._ports[sender].send(worker, version)

    def _over_link(self, worker: int, version: Version) -> None:
        if not self._links:
            self._arrived(worker, version)
            return
        self._links[worker].send(version)
        self._look_later(worker)

    def _look_later(self, worker: int) -> None:
        due = self._links[worker].due_ns
        if due is not None and due != self._looks_at[worker]:
            self._looks_at[worker] = due
            self._clock.at(due, self._look, worker, due)

    def _look(self, worker: int, time_ns: int) -> None:
        """See what has come over a link by now."""
        if time_ns != self._looks_at[worker]:
            return  # something happens earlier, and then the next look was planned anew
        self._looks_at[worker] = None
        for message in self._links[worker].arrived(time_ns):
            self._arrived(worker, message.block)
        self._look_later(worker)

    def _arrived(self, worker: int, version: Version) -> None:
        self._arrive(worker, version.number)
        if self._network.topology == "tree":
            self._send(worker, self._network.receivers(worker, self._num_workers), version)
