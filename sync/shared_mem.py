"""Weights through shared memory: one block a version, read by every worker where it lies.

    trainer: send()                       worker: receive()
    ---------------                       -----------------
    write slot  (one pass)
    latest = slot, version
    write into the models that rest
    ring idle workers  ---------------->  pin the slot; copy it, or point at it
    wait for all  <--------------- ring   done = version

`board.py` has the protocol word by word, `slots.py` the memory, `home.py` what resting means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any, Self, cast

from sync.board import EVENTS, GREETED, LEFT, Board, Event, Row, Word
from sync.home import AWAY, RESTING, Home
from sync.layout import Layout
from sync.memory import Doorbell, Watch
from sync.scheme import WeightSyncScheme
from sync.sender import SenderEnd
from sync.slots import Slots
from sync.snapshot import NEVER, Snapshot
from sync.strategy import WeightStrategy
from sync.transport import Transport

SEGFAULT_HINT = "; did it write to its parameters? Under zero-copy they are read-only there"


class SharedMemTransport(Transport):
    """One worker's row on the board, and the slots it speaks of."""

    lends = True

    def __init__(self, slots: Slots, board: Board, worker_idx: int, *, timeout: float = 10.0):
        super().__init__(timeout=timeout)
        self.slots: Slots = slots
        self.board = board
        self.worker_idx = worker_idx

    def _forget(self) -> None:
        super()._forget()
        self.__dict__.pop("row", None)
        self._pin = 0
        self._seen = self._word = 0
        self._said = b""  # by the worker, all of which is taken in
        self._events = 0
        self._put = NEVER  # the version put into the worker's model last, and booked
        self._errors = 0
        self._greetings = 0
        self._left = 0
        self._sender: Watch | None = None

    @cached_property
    def row(self) -> Row:
        return self.board.rows[self.worker_idx]

    def alone(self) -> Self:
        twin = super().alone()
        twin.board = self.board.for_worker(self.worker_idx)
        return twin

    # -- the sender's end

    def offer(self, slot: int, version: int) -> None:
        if self.row.event_count - self._events > EVENTS // 2:
            self.collect()
        self.addressed = version
        self.stats.addressed += 1
        self.row.announce((version + 1) << 16 | slot)

    def held(self) -> set[int]:
        return self.row.held()

    def wake(self) -> None:
        self.row.order()
        self.row.wake()

    def put_home(self, slot: int) -> bool:
        """Put an offered slot into the model of a worker that rests; False if it does not.

        What is put there is in use: an answer that nobody needs to send.
        """
        row = self.row
        if row.home != RESTING or self.watch is None or self.watch.gone:
            return False
        event = self.slots.put_home(self.worker_idx, slot, self._may_put)
        if event is None:
            return False
        self._hear(row.event_count)  # what it says of earlier versions comes first
        self.heard(event)
        self._put = self.addressed
        return True

    def _may_put(self, home: Snapshot) -> bool:
        """It may have moved out, or be another, who is not known yet, or have the version."""
        row = self.row
        same = row.home != AWAY and row.greetings == self._greetings
        return same and home.version != self.addressed

    @property
    def answer_bell(self) -> Doorbell:
        return self.board.sender_bell

    def expect(self, version: int) -> None:
        self.row.expect(version)
        if version != NEVER:
            self.row.order()

    def collect(self) -> None:
        row = self.row
        said = row.said()
        if said == self._said:
            return
        if row.state == GREETED and row.greetings != self._greetings:
            self._greetings = row.greetings
            self._hear(row.events_before)
            self._put = NEVER
            self.greeted(row.pid)
        self._hear(row.event_count)
        if row.error_count != self._errors:
            self._errors = row.error_count
            self.failed(row.error_version, row.error())
        if row.state == LEFT and row.greetings != self._left:
            self._left = row.greetings
            self.left()
        self._said = said

    def _hear(self, event_count: int) -> None:
        for number in range(self._events, event_count):
            event = self.row.event(number)
            if event.version != self._put:
                self.heard(event)
        self._events = event_count

    def news_fds(self) -> list[int]:
        return [self.board.sender_bell.fd]

    def offer_again(self) -> bool:
        latest = self.row.latest  # if it points at one, that slot is kept
        return latest != 0 and self.slots[Word.unpack(latest).slot].builds_on == NEVER

    def retract(self) -> None:
        self.row.announce(0)

    def close(self) -> None:
        self.board.close()

    # -- the receiver's end

    def greet(self) -> None:
        self._sender = Watch(self.board.sender_pid)
        self._seen = self._word = 0
        self.row.greet()

    def has_news(self) -> bool:
        return self.board.rows[self.worker_idx].latest != self._seen

    def newest(self) -> tuple[Snapshot, int] | None:
        row = self.row
        if row.latest == self._seen:
            return None
        pinned = row.pin(self._pin)
        if pinned is None:  # it was taken back
            self._seen = 0
            return None
        self._word, retries = pinned
        word = Word.unpack(self._word)
        snapshot = self.slots[word.slot]
        assert self._is_whole(snapshot, word.version), "a pinned slot was written"
        return snapshot, retries

    def _is_whole(self, snapshot: Snapshot, version: int) -> bool:
        return snapshot.version == version

    def home(self) -> Home | None:
        return self.slots.home(self.worker_idx, self.row.tell_home)

    def found_at_home(self, block: Snapshot) -> bool:
        self._word = self.row.latest
        news = self._word not in (0, self._seen)
        return news and Word.unpack(self._word).version == block.version

    def look_again(self) -> None:
        self._seen = 0

    def in_use(self) -> None:
        if self.zero_copy:  # hold this slot while it is in use, and let go of the one before
            self._pin = 1 - self._pin
        self.row.unpin(self._pin)

    def applied(self, event: Event) -> None:
        self.row.done(event)
        self._seen = self._word  # not before: what an interrupt cuts short is done again

    def refused(self, version: int, text: str) -> None:
        self._seen = self._word
        self.row.unpin(self._pin)
        self.row.fail(version, text)

    def skip(self, snapshot: Snapshot) -> None:
        self._seen = self._word
        self.row.unpin(self._pin)

    @contextlib.contextmanager
    def dozing(self) -> Iterator[None]:
        row = self.row
        row.idle(True)
        try:
            yield
        finally:
            row.idle(False)
            row.bell.silence()
            if self.board.closed:  # that rang once, and every later wait must hear it too
                row.bell.ring()

    def offer_fds(self) -> list[int]:
        return [self.row.bell.fd, *(self._sender.fds() if self._sender is not None else ())]

    def sender_gone(self) -> bool:
        return self.board.closed or (self._sender is not None and self._sender.look())

    def leave(self) -> None:
        self.row.leave()


class SharedMemSenderEnd(SenderEnd):
    """Writes into the models of workers that rest, wakes those that wait for their bell.

    The others look at the board by themselves.
    """

    def summary(self) -> dict[str, Any]:
        """With what keeps a store before a load: a "fence", x86's own, or a "lock" elsewhere."""
        lines = [t for t in self.transports.values() if isinstance(t, SharedMemTransport)]
        return {**super().summary(), "order": lines[0].row.order.kind}

    def _offer(self, transports: Collection[Transport], slot: int, version: int) -> None:
        announce(cast("Collection[SharedMemTransport]", transports), transports, slot, version)


def announce(
    lines: Collection[SharedMemTransport],
    transports: Collection[Transport],
    slot: int,
    version: int,
) -> None:
    """Offer a slot so that it is seen whole, and by those who sleep, too.

    lines: those of the transports, or of parts of theirs, that read it where it lies.
    """
    order = next(iter(lines)).row.order
    order()  # the block is visible before it is announced
    try:
        for transport in transports:
            transport.offer(slot, version)
        order()  # the announcement is visible before we look who sleeps
        for line in lines:
            if not line.put_home(slot):
                line.row.wake()
    except BaseException:  # an interrupt: who got nothing takes the slot
        order()
        for line in lines:
            line.row.wake()
        raise


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Snapshots in shared memory, one pass to write and none to move.

    per_worker_weights: allow `send({0: w0, 2: w2})`, each worker its own weights.
    zero_copy: whether workers point their parameters at the snapshot (True), copy it (False), or
        point from a quarter of a megabyte on (None). Parameters that point at a snapshot are
        read-only in the worker: writing to them ends its process. Buffers are always copied.
    """

    _sender_end = SharedMemSenderEnd

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        zero_copy: bool | None = None,
        **options: Any,
    ):
        super().__init__(strategy, sync=sync, **options)
        self.per_worker_weights = per_worker_weights
        self._point_at_snapshots(zero_copy)

    def _open(self, layout: Layout, num_workers: int) -> tuple[Slots, dict[int, Transport]]:
        # At most three slots can be held for each worker: its latest, the one in use, and the one
        # it is changing to. One more each can be written, if each gets weights of its own.
        slots = Slots(layout, 4 * num_workers, homes=num_workers)
        board = Board(num_workers)
        transports: dict[int, Transport] = {}
        for worker in range(num_workers):
            transports[worker] = SharedMemTransport(slots, board, worker)
            if self._zero_copy is not False:
                transports[worker].segfault_hint = SEGFAULT_HINT
        return slots, transports

    def _check_by_worker(self) -> None:
        if not self.per_worker_weights:
            raise ValueError(
                "send({worker: weights}) needs SharedMemWeightSyncScheme(per_worker_weights=True)"
            )
