"""A slow link on one machine: versions reach workers as late as a network would deliver them.

    sender                                                                    worker
    ------                                                                    ------
    publish()  -> [waiting: one version, the newest]
                    -> [transmission: bytes / bandwidth]
                        -> [in flight: latency + jitter, in order]  --->  take(), apply
    poll(): APPLIED  <- [latency]  <------------------------------------  answer()

Each worker has its own link. During a transmission, only the newest published version waits, as in
a socket with room for one message. A lost packet is sent again one round trip later. Versions in
flight are kept in private memory, and written into a block of the inner channel when they arrive.
Version and time of publication travel inside the block, so stamps and latencies include the delay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sync.channel_interface import (
    APPLIED,
    FAILED,
    JOINED,
    LEFT,
    About,
    Answer,
    SenderChannel,
    now_ns,
)
from sync.model.block import Snapshot
from sync.worker_record import KEPT, percentiles

PACKET_BYTES = 1500
# The most messages in flight on one link: each takes the memory of a block.
WINDOW = 64
# The sender does not notice a lost packet sooner than this.
MIN_ROUND_TRIP_NS = 1_000_000
_MS = 1_000_000


@dataclass(frozen=True)
class Link:
    """The network between the trainer and each of its workers.

    latency_ms: in each direction.
    jitter_ms: the most that is added at random to the latency towards the worker.
    bandwidth_mbps: in megabits a second; None for no limit.
    loss: the share of packets (of 1,500 bytes) that are lost and sent again.
    seed: of jitter and loss.
    """

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth_mbps: float | None = None
    loss: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("latency_ms", "jitter_ms"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: expected 0 or more milliseconds")
        if self.bandwidth_mbps is not None and not self.bandwidth_mbps > 0:
            raise ValueError(
                f"bandwidth_mbps={self.bandwidth_mbps}: expected more than 0, or none for no limit"
            )
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss={self.loss}: expected a share of packets, 0 <= loss < 1")

    @property
    def is_off(self) -> bool:
        """Whether nothing is delayed."""
        return not (self.latency_ms or self.jitter_ms or self.loss) and self.bandwidth_mbps is None

    @classmethod
    def of(cls, given: Link | str | None) -> Link | None:
        """A link, given as itself or by its name in `PRESETS`; None if nothing would be delayed."""
        if isinstance(given, str) and given in PRESETS:
            given = PRESETS[given]
        if not isinstance(given, Link | None):
            raise ValueError(f"link={given!r}: expected one of {', '.join(PRESETS)}, or a Link")
        return None if given is None or given.is_off else given


PRESETS = {
    "lan": Link(latency_ms=0.2, jitter_ms=0.05, bandwidth_mbps=1_000.0),
    "datacenter": Link(latency_ms=0.05, jitter_ms=0.02, bandwidth_mbps=25_000.0),
    "wan": Link(latency_ms=40.0, jitter_ms=4.0, bandwidth_mbps=100.0, loss=0.001),
}


@dataclass
class Transmission:
    """One version on its way to a worker."""

    block: Any  # with `nbytes`, how much is transmitted
    sent_ns: int
    arrives_ns: int = 0


class WorkerLink:
    """The link to one worker: versions in flight, and counts of earlier ones.

    clock: returns the time in nanoseconds; `now_ns` if there is none.
    sent: messages whose transmission began.
    coalesced: messages that a newer one replaced before their transmission.
    retransmitted: lost packets that were sent again.
    delays_ns: from publication to arrival, of the newest messages.
    """

    def __init__(self, link: Link, worker: int, clock: Callable[[], int] | None = None):
        self._link = link
        self._clock = clock or now_ns
        self._random = np.random.default_rng([link.seed, worker])
        self.latency_ns = round(link.latency_ms * _MS)
        self.sent = self.coalesced = self.retransmitted = self.delivered = 0
        self.delays_ns: deque[int] = deque(maxlen=KEPT)
        self.reset(connected=False)

    def reset(self, *, connected: bool) -> None:
        """Drop the connection and everything in flight. `connected`: open a new one."""
        self._connected = connected
        self._waiting: Transmission | None = None
        self._in_flight: deque[Transmission] = deque()
        self._answers: deque[tuple[int, Answer]] = deque()  # with the times at which they arrive
        self._free_at_ns = self._last_arrival_ns = 0

    # -- to the worker

    def send(self, block: Any) -> None:
        """Transmit this block as soon as the link is free; it replaces a block that waits.

        Without a connection it is dropped. A process that connects is sent the newest version.
        """
        if not self._connected:
            return
        now = self._clock()
        self._transmit(now)
        self.coalesced += self._waiting is not None
        self._waiting = Transmission(block, now)
        self._transmit(now)

    def _transmit(self, now: int) -> None:
        """Begin to transmit the message that waits, if the link is free."""
        message = self._waiting
        if message is None or now < self._free_at_ns or len(self._in_flight) >= WINDOW:
            return
        self._waiting = None
        begin = max(self._free_at_ns, message.sent_ns)
        transmission_ns, lost_ns = self._durations(message.block.nbytes)
        self._free_at_ns = begin + transmission_ns
        jitter_ns = round(self._random.random() * self._link.jitter_ms * _MS)
        arrival = self._free_at_ns + lost_ns + self.latency_ns + jitter_ns
        message.arrives_ns = self._last_arrival_ns = max(arrival, self._last_arrival_ns)
        self._in_flight.append(message)
        self.sent += 1

    def _durations(self, nbytes: int) -> tuple[int, int]:
        """How long the transmission takes, and the wait for packets that are sent again."""
        total = packets = lost = -(-nbytes // PACKET_BYTES)
        rounds = 0
        while self._link.loss and (lost := int(self._random.binomial(lost, self._link.loss))):
            self.retransmitted += lost
            total += lost
            rounds += 1
        transmission_ns = 0
        if self._link.bandwidth_mbps is not None:
            transmission_ns = round(
                nbytes * (total / max(1, packets)) * 8e3 / self._link.bandwidth_mbps
            )
        return transmission_ns, rounds * max(2 * self.latency_ns, MIN_ROUND_TRIP_NS)

    def arrived(self, now: int) -> Iterator[Transmission]:
        """Remove the messages that have arrived, in the order of sending."""
        self._transmit(now)
        while self._in_flight and self._in_flight[0].arrives_ns <= now:
            message = self._in_flight[0]
            yield message  # if the caller raises, it is delivered the next time
            self._in_flight.popleft()
            self.delivered += 1
            self.delays_ns.append(self._clock() - message.sent_ns)
            self._transmit(now)

    # -- from the worker

    def send_back(self, answer: Answer) -> None:
        """Delay an answer by the latency."""
        now = self._clock()
        given_ns = min(answer.applied_ns, now) if answer.kind == APPLIED else now
        self._answers.append((given_ns + self.latency_ns, answer))

    def answers(self, now: int) -> Iterator[Answer]:
        """Remove the answers that have arrived."""
        while self._answers and self._answers[0][0] <= now:
            _, answer = self._answers.popleft()
            yield answer._replace(return_ns=answer.return_ns + self.latency_ns)
            if answer.kind == LEFT:
                self.reset(connected=False)

    # -- its state

    @property
    def blocks(self) -> list[Any]:
        """The blocks that have not arrived yet."""
        waiting = [] if self._waiting is None else [self._waiting]
        return [message.block for message in (*waiting, *self._in_flight)]

    @property
    def num_in_flight(self) -> int:
        """How many versions have not arrived, including the one that waits."""
        return len(self.blocks)

    @property
    def due_ns(self) -> int | None:
        """When the next event is due."""
        due = [self._in_flight[0].arrives_ns] if self._in_flight else []
        if self._waiting is not None and len(self._in_flight) < WINDOW:
            due.append(self._free_at_ns)
        if self._answers:
            due.append(self._answers[0][0])
        return min(due, default=None)

    def summary(self) -> dict[str, Any]:
        """Counts so far, and the delays in milliseconds."""
        return {
            "in_flight": self.num_in_flight,
            "sent": self.sent,
            "coalesced": self.coalesced,
            "retransmitted": self.retransmitted,
            "delivered": self.delivered,
            "delay_ms": percentiles(list(self.delays_ns)),
        }


class SlowLinkSender(SenderChannel):
    """Puts a separate link between `inner` and each worker.

    links: by worker.
    """

    def __init__(self, inner: SenderChannel, link: Link):
        super().__init__(inner.layout, inner.num_workers)
        self.inner, self.handout = inner, inner.handout
        self.mechanism, self.moved = inner.mechanism, inner.moved
        self.links: dict[int, WorkerLink] = {
            worker: WorkerLink(link, worker) for worker in range(inner.num_workers)
        }

    def blocks_in_use(self) -> list[Snapshot]:
        return [block for link in self.links.values() for block in link.blocks]

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        for worker in workers:
            self.links[worker].send(block)
        self._deliver(now_ns())

    def poll(self) -> list[Answer]:
        heard: list[Answer] = []
        for answer in self.inner.poll():
            if answer.kind in (APPLIED, FAILED, LEFT):
                self.links[answer.worker].send_back(answer)
            else:  # JOINED or LOST
                self.links[answer.worker].reset(connected=answer.kind == JOINED)
                heard.append(answer)
        now = now_ns()
        self._deliver(now)
        for link in self.links.values():
            heard += link.answers(now)
        return heard

    def _deliver(self, now: int) -> None:
        """Publish blocks that have arrived through the inner channel."""
        for worker, link in self.links.items():
            for message in link.arrived(now):
                block = self.inner.free_block([])
                block.become(message.block)
                self.inner.publish(block, [worker])

    def due_ns(self) -> int | None:
        due = [self.inner.due_ns(), *(link.due_ns for link in self.links.values())]
        return min((at for at in due if at is not None), default=None)

    def fds(self) -> list[int]:
        return self.inner.fds()

    def close(self) -> None:
        for link in self.links.values():
            link.reset(connected=False)
        self.inner.close()

    def about(self, worker: int) -> About:
        about = self.inner.about(worker)
        statistics = {**about.statistics, "link": self.links[worker].summary()}
        return about._replace(statistics=statistics)

    # -- the same as without a link

    def meet(self, worker: int) -> None:
        self.inner.meet(worker)
