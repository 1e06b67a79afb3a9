"""A slow link on one machine: snapshots reach workers as late as a network would bring them.

    sender                                                          worker
    ------                                                          ------
    publish  -> [next: one deep, newest wins]
                 -> [on the wire: bytes / bandwidth]
                     -> [in flight: latency + jitter, in order]  -> offered: applies it
    "in use" <- [on its way back: latency] <------------------------ acknowledges

Each worker has a line of its own. While a snapshot is being put on the wire, the newest of those
published meanwhile waits for it, as it would for a socket with room for one message. A lost packet
is sent again a round trip later. What is in flight lies in memory of the sender's own, so the slots
of a scheme are written when a snapshot arrives, not before. Versions and times of publication
travel inside the snapshots, so what comes late is stamped and measured as what it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from sync.board import now_ns
from sync.layout import Layout
from sync.memory import Doorbell
from sync.snapshot import NEVER, Snapshot
from sync.stats import KEPT, percentiles
from sync.transport import Transport
from sync.wire.coder import private_snapshot

PACKET_BYTES = 1500
# More are not in flight on one line at a time: each takes the memory of a snapshot.
WINDOW = 64
# A lost packet is not missed sooner than this.
LEAST_ROUND_TRIP_NS = 1_000_000
_IDLE = 2**63 - 1
_MS = 1_000_000


@dataclass(frozen=True)
class Link:
    """What lies between the trainer and each of its workers.

    latency_ms: from one end to the other, each way.
    jitter_ms: up to so much is added to the way there, at random.
    bandwidth_mbps: in megabits a second; None for no limit.
    loss: the share of packets (of 1,500 bytes) that have to be sent again.
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
        """Nothing is delayed."""
        return not (self.latency_ms or self.jitter_ms or self.loss) and self.bandwidth_mbps is None

    @classmethod
    def of(cls, given: Link | str | None) -> Link | None:
        """A link, one of `PRESETS` by name, or None where nothing would be delayed."""
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


class Outbox:
    """Snapshots that were published and have not arrived everywhere, by number."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._blocks: list[Snapshot] = []

    def __getitem__(self, number: int) -> Snapshot:
        return self._blocks[number]

    def free(self, held: set[int]) -> int:
        """The lowest number that is not held, made if there is none."""
        number = next((n for n in range(len(self._blocks)) if n not in held), len(self._blocks))
        if number == len(self._blocks):
            self._blocks.append(private_snapshot(self._layout))
        return number


@dataclass
class _Parcel:
    """One version on its way."""

    number: int
    version: int
    sent_ns: int
    arrives_ns: int = 0


class Line:
    """One worker's link: what is where on it, and what became of it so far."""

    def __init__(self, link: Link, worker_idx: int, outbox: Outbox):
        self._link = link
        self._outbox = outbox
        self._random = np.random.default_rng([link.seed, worker_idx])
        self.latency_ns = round(link.latency_ms * _MS)
        self.next: _Parcel | None = None
        self.flying: deque[_Parcel] = deque()
        self.last: _Parcel | None = None
        self._answers: deque[tuple[int, Callable[[], None]]] = deque()
        self._busy_until_ns = 0
        self._last_arrival_ns = 0
        self.sent = self.coalesced = self.retransmitted = self.delivered = 0
        self.delays_ns: deque[int] = deque(maxlen=KEPT)

    # -- there

    def post(self, number: int, version: int) -> None:
        """Have a snapshot of the outbox sent as soon as the wire is free."""
        now = now_ns()
        self.move_on(now)
        self.coalesced += self.next is not None
        self.next = self.last = _Parcel(number, version, now)
        self.move_on(now)

    def move_on(self, now: int) -> None:
        """Put what waits on the wire, if it is free."""
        parcel = self.next
        if parcel is None or now < self._busy_until_ns or len(self.flying) >= WINDOW:
            return
        self.next = None
        start = max(self._busy_until_ns, parcel.sent_ns)
        wire_ns, wait_ns = self._transmission(self._outbox[parcel.number].wire_bytes)
        self._busy_until_ns = start + wire_ns
        jitter_ns = round(self._random.random() * self._link.jitter_ms * _MS)
        arrival = self._busy_until_ns + wait_ns + self.latency_ns + jitter_ns
        parcel.arrives_ns = self._last_arrival_ns = max(arrival, self._last_arrival_ns)
        self.flying.append(parcel)
        self.sent += 1

    def _transmission(self, nbytes: int) -> tuple[int, int]:
        """How long the wire is taken, and how long was waited for what was lost."""
        packets = missing = -(-nbytes // PACKET_BYTES)
        rounds = 0
        while self._link.loss and (missing := int(self._random.binomial(missing, self._link.loss))):
            self.retransmitted += missing
            packets += missing
            rounds += 1
        wire_ns = 0
        if self._link.bandwidth_mbps is not None:
            share = packets / max(1, -(-nbytes // PACKET_BYTES))
            wire_ns = round(nbytes * share * 8e3 / self._link.bandwidth_mbps)
        return wire_ns, rounds * max(2 * self.latency_ns, LEAST_ROUND_TRIP_NS)

    def arrived(self, now: int) -> _Parcel | None:
        """The next that has arrived, in the order of sending; it stays the next until `drop`."""
        self.move_on(now)
        return self.flying[0] if self.flying and self.flying[0].arrives_ns <= now else None

    def drop(self, parcel: _Parcel) -> None:
        """It is handed over: an interrupt before this repeats it, and loses nothing."""
        if self.flying and self.flying[0] is parcel:
            self.flying.popleft()
        self.delivered += 1
        self.delays_ns.append(now_ns() - parcel.sent_ns)

    # -- and back

    def answer(self, said_ns: int, book: Callable[[], None]) -> None:
        """Have `book` called when what the worker said at `said_ns` has come all the way."""
        self._answers.append((min(said_ns, now_ns()) + self.latency_ns, book))

    def heard(self, now: int) -> None:
        """Take in the answers that have come."""
        while self._answers and self._answers[0][0] <= now:
            answer = self._answers[0]
            answer[1]()
            if self._answers and self._answers[0] is answer:
                self._answers.popleft()

    # -- and what else

    def cut(self) -> None:
        """A new connection: nothing of the old one arrives any more."""
        self.next = None
        self.flying.clear()
        self._answers.clear()
        self._busy_until_ns = self._last_arrival_ns = 0

    def greeted(self) -> None:
        """A process took the worker's place: what builds on what another held is of no use."""
        self._answers.clear()
        self.flying = deque(p for p in self.flying if self._stands_alone(p))
        if self.next is not None and not self._stands_alone(self.next):
            self.next = None

    def _stands_alone(self, parcel: _Parcel) -> bool:
        return self._outbox[parcel.number].builds_on == NEVER

    def again(self) -> bool:
        """Send what was sent last once more; False if a newcomer could not read it."""
        if self.last is None or not self._stands_alone(self.last):
            return False
        self.post(self.last.number, self.last.version)
        return True

    @property
    def held(self) -> set[int]:
        """The numbers in the outbox that are still needed."""
        return {p.number for p in (self.next, self.last, *self.flying) if p is not None}

    @property
    def num_in_flight(self) -> int:
        """How many versions have not arrived, with the one that waits."""
        return len(self.flying) + (self.next is not None)

    @property
    def due_ns(self) -> int:
        """When something happens next."""
        due = self.flying[0].arrives_ns if self.flying else _IDLE
        if self.next is not None and len(self.flying) < WINDOW:
            due = min(due, self._busy_until_ns)
        return min(due, self._answers[0][0]) if self._answers else due

    def summary(self) -> dict[str, Any]:
        """Counts so far, and what the delays were (ms)."""
        return {
            "in_flight": self.num_in_flight,
            "sent": self.sent,
            "coalesced": self.coalesced,
            "retransmitted": self.retransmitted,
            "delivered": self.delivered,
            "delay_ms": percentiles(list(self.delays_ns)),
        }


class LinkEnd:
    """The lines of all workers, and a thread that moves things along when they are due.

    Everything happens under the sender's lock. Whoever holds it while he waits for workers calls
    `pump` when `bell` rings; otherwise the thread does.
    """

    def __init__(
        self,
        link: Link,
        layout: Layout,
        transports: dict[int, Transport],
        *,
        lock: Any,
        deliver: Callable[[Transport, Snapshot, int], None],
    ):
        self.bell = Doorbell()
        self.outbox = Outbox(layout)
        self.lines = {worker: Line(link, worker, self.outbox) for worker in transports}
        self._transports = transports
        self._lock = lock
        self._deliver = deliver
        self._due_ns = _IDLE
        self._turn = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None  # raised by the thread; the next call raises it
        for worker, transport in transports.items():
            transport.line = self.lines[worker]

    def held(self) -> set[int]:
        """The numbers in the outbox that are still needed."""
        return set().union(*(line.held for line in self.lines.values()))

    def post(self, workers: Collection[int], number: int, version: int) -> None:
        """Send a snapshot of the outbox to these workers."""
        for worker in workers:
            transport = self._transports[worker]
            self.lines[worker].post(number, version)
            transport.addressed = version
            transport.stats.addressed += 1
        self.pump()

    def again(self, worker: int) -> bool:
        """Send a newcomer what its predecessor was sent last; False if it could not read it."""
        self.lines[worker].cut()
        self._transports[worker].retract()
        found = self.lines[worker].again()
        self.pump()
        return found

    def pump(self) -> None:
        """Deliver what has arrived, and take in the answers that have; under the lock."""
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error
        now = now_ns()
        for worker, line in self.lines.items():
            line.heard(now)
            while (parcel := line.arrived(now)) is not None:
                self._hand_over(self._transports[worker], parcel)
                line.drop(parcel)
        self._due_ns = due = min(line.due_ns for line in self.lines.values())
        if due < _IDLE and not self._stopping:
            with self._turn:
                self._turn.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-link", daemon=True)
                self._thread.start()

    def _hand_over(self, transport: Transport, parcel: _Parcel) -> None:
        addressed, counted = transport.addressed, transport.stats.addressed
        self._deliver(transport, self.outbox[parcel.number], parcel.version)
        # It was counted when it was posted, and what was posted since is what is waited for.
        transport.addressed, transport.stats.addressed = addressed, counted

    def _run(self) -> None:
        while not self._stopping:
            with self._turn:
                wait_ns = self._due_ns - now_ns()
                if wait_ns > 0:
                    self._turn.wait(min(wait_ns * 1e-9, 60.0))
                    continue
            if self._lock.acquire(blocking=False):
                try:
                    self.pump()
                except Exception as error:  # noqa: BLE001 - it is raised where it can be heard
                    self._failure, self._thread = error, None
                    return
                finally:
                    self._lock.release()
            else:  # whoever has it, and waits, is woken
                self.bell.ring()
                time.sleep(100e-6)

    def stop(self) -> None:
        """Drop what is under way. The thread ends within a turn."""
        self._stopping = True
        with self._turn:
            self._turn.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
