"""One worker's line: by memory if it is near, else over an engine.

    trainer                                   the worker's process, elsewhere
    -------                                   -------------------------------
    offer v1    -- deliver(block) -------->   inbox: v1          (see inbox.py)
    offer v2       waits: v1 is on its way
    offer v3       takes v2's place
                <------ v1 is in use          receive()
                -- deliver(block) -------->   inbox: v3

So at most one version is on its way to a worker and one waits, whatever the trainer's pace; a call
returns when the version is in use.

    trainer                                   the worker's process
    -------                                   --------------------
    offer v0       on the board, if the scheme shares memory
                -- await_worker ---------->   has it the trainer's memory? (nearby.py)
                <------ NEAR                  yes: it looks at the board, as under shared memory
                <------ FAR                   no: from now on as above

A worker whose place is taken by another is asked for again.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sync import interrupts
from sync.board import Event, now_ns
from sync.errors import WorkerDied, WorkerTimeout
from sync.layout import Layout
from sync.memory import Doorbell
from sync.remote import relay
from sync.remote.engine import PeerDied
from sync.remote.hub import Hub, Way, attempt
from sync.remote.inbox import (
    ABSENT,
    DONE,
    FAILED,
    FAR,
    LEFT,
    NEAR,
    Answer,
    Inbox,
    expect_worker,
)
from sync.remote.near import NearTransport
from sync.remote.nearby import Address, ask
from sync.slots import Slots
from sync.snapshot import NEVER, Snapshot
from sync.transport import Transport

# Smaller blocks are copied to where there are views into each leaf: making those takes longer.
_LANDING_BYTES = 1 << 18


class SlotsElsewhere(Slots):
    """What a worker elsewhere has of the trainer's slots: their layout."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def claim(self, worker_idx: int) -> bool:
        return True

    def give_back(self, worker_idx: int) -> None:
        """Nothing was claimed: the trainer knows whom it calls."""

    def read_only(self) -> Slots:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


class RemoteTransport(Transport):
    """The same at both ends of any engine."""

    slots: Slots

    def __init__(self, slots: Slots, key: str, worker_idx: int, *, timeout: float = 10.0):
        super().__init__(timeout=timeout)
        self.slots = slots
        self.key = key
        self.worker_idx = worker_idx
        self.address: Address | None = None  # where the worker asks for the trainer's memory

    def _forget(self) -> None:
        super()._forget()
        self.hub: Hub | None = None
        self.near: NearTransport | None = None
        self.is_near = False  # how the version came that was acknowledged last
        self._where = FAR  # ABSENT: not known yet
        self._asked: Way | None = None  # what there was to bring when the worker was asked for
        self._asks = 0
        self._lock: Any = contextlib.nullcontext()
        self._on_the_way: Way | None = None
        self._next: Way | None = None
        self._last: Way | None = None
        self._answers: deque[tuple[Way, Future[Any], int]] = deque()
        self._owner = ""
        self._dead = ""
        self._inbox: Inbox | None = None
        self._landing: Snapshot | None = None

    # -- the sender's end

    def become_sender(self, hub: Hub) -> None:
        """From now on versions can be offered."""
        self.hub = hub
        self._lock = threading.RLock()
        if hub.near is not None:
            self.near, self.address = hub.near.rows[self.worker_idx], hub.near.address
            self.near.become_part_of(self)
            self._where = ABSENT

    def offer(self, slot: int, version: int) -> None:
        with interrupts.held(), self._lock:
            self.addressed = version
            self.stats.addressed += 1
            self._last = Way(version, slot, self.slots[slot].published_ns)
            self._offer_last()

    @property
    def row(self) -> NearTransport | None:
        """Where a worker that is near, or may be, looks for versions."""
        return None if self._where == FAR else self.near

    def _offer_last(self) -> None:
        assert self._last is not None
        if (row := self.row) is not None:
            row.offer(self._last.slot, self._last.version)
        if self._where != NEAR:
            self._next = self._last
            self._feed()

    def _feed(self) -> None:
        """Send what is next, unless the worker has one to answer to."""
        if self._on_the_way is not None or self._next is None or self._dead:
            return
        assert self.hub is not None
        if self._where == ABSENT:
            if self._asked is None:
                self._asked = self._next
                self._asks += 1
                found = attempt(self.hub.await_worker, self.worker_idx)
                found.add_done_callback(partial(self._found, self._asks, self._next))
            return
        way = self._next
        answer = attempt(self.hub.post, self.worker_idx, way)
        self._on_the_way, self._next = way, None
        answer.add_done_callback(partial(self._answered, way))

    def _found(self, ask: int, way: Way, future: Future[int]) -> None:
        """In a thread of the engine: where the worker is; `way` is what it is to be brought."""
        assert self.hub is not None
        with self._lock:
            if self._asks != ask or self._asked is None:  # it has been asked for again
                return
            if future.exception() is not None:
                self._asked = None
                self._answers.append((way, future, now_ns()))
            elif future.result() != ABSENT:
                self._settle_on(future.result())
            else:
                self._asked = None
                if self._next is not way:
                    self._feed()
        self.hub.bell.ring()

    def _settle_on(self, where: int) -> None:
        assert self.near is not None
        self._where, self._asked = where, None
        if where == NEAR:
            self._next = None
        else:
            self.near.retract()
            self.near.expect(NEVER)
            self._feed()

    def found_near(self, pid: int) -> None:
        """The worker greeted in its row."""
        with self._lock:
            self._settle_on(NEAR)
        self._dead = ""  # that was its predecessor
        self._owner = f"near {pid}"
        self.greeted(pid)

    def heard_near(self, event: Event) -> None:
        """A version is in use that was read from memory."""
        self.is_near = True
        self.heard(event)

    def _answered(self, way: Way, future: Future[Answer]) -> None:
        """In a thread of the engine: the worker has room for another."""
        assert self.hub is not None
        with self._lock:
            self._answers.append((way, future, now_ns()))
            if self._on_the_way is way:
                self._on_the_way = None
            if not isinstance(future.exception(), PeerDied):
                self._feed()
        self.hub.bell.ring()

    def collect(self) -> None:
        if (row := self.row) is not None:
            row.collect()
        while self._answers:
            way, future, heard_ns = self._answers.popleft()
            error = future.exception()
            if isinstance(error, PeerDied):
                self._dead = str(error)
            elif error is not None:
                notes = "\n".join([f"{type(error).__name__}: {error}", *_notes(error)])
                self.failed(way.version, notes)
            else:
                self._book(way, future.result(), heard_ns)

    def _book(self, way: Way, answer: Answer, heard_ns: int) -> None:
        if answer.owner and answer.owner != self._owner:
            self._owner = answer.owner
            self.greeted(answer.pid)
            self.watch = None  # the process is not of this machine; the engine watches it
        if answer.kind == DONE:
            self.is_near = False
            # Clocks differ between machines: what is counted from the publication is counted here.
            seen_ns = max(way.published_ns, heard_ns - answer.took_ns)
            self.heard(Event(way.version, way.published_ns, seen_ns, heard_ns, answer.retries))
        elif answer.kind == FAILED:
            self.failed(way.version, answer.text)
        elif answer.kind == LEFT:
            self.left()
        elif answer.kind == NEAR and self.near is not None:  # another worker of the same process
            with self._lock:
                self._where = NEAR
                self._offer_last()
            self.wake()

    def judge(self) -> None:
        super().judge()
        assert self.hub is not None
        engine = self.hub.engine
        if engine is not None and not self._dead:
            why = engine.gone(self.worker_idx) or ""
            if not why and self.watch is not None and self.watch.gone:
                why = f"its process ended (pid {self.watch.pid})"
            if why:
                self._dead = f"{engine.describe(self.worker_idx)} is gone: {why}"
        if self._dead:
            self.connected = False
            self.failure = WorkerDied(self.worker_idx, f"{self} died: {self._dead}")

    def retract(self) -> None:
        if self.near is not None:
            self.near.retract()

    def wake(self) -> None:
        if (row := self.row) is not None:
            row.wake()

    def expect(self, version: int) -> None:
        if self.near is not None:
            with self._lock:  # a row that nobody reads must not be waited for
                self.near.expect(NEVER if self._where == FAR else version)

    def expect_newcomer(self) -> None:
        self.collect()
        ended = self.has_left or (self.watch is not None and self.watch.look())
        given_up = ended or self._dead != ""
        met = 0 if self.near is None else self.near.greetings
        super().expect_newcomer()
        assert self.hub is not None
        assert self.hub.engine is not None
        if self.hub.engine.gone(self.worker_idx) is not None:
            return
        if not self._owner and isinstance(self.failure, WorkerDied):
            self.failure = None  # nobody had the place
        if self.failure is None:
            with self._lock:
                if self._dead and self.bases is not None:
                    self.bases.forget()
                self._dead = ""
                if self.near is not None:
                    if given_up:
                        self.near.expect_another(met)
                    self._where, self._asked = ABSENT, None

    def offer_again(self) -> bool:
        with interrupts.held(), self._lock:
            if self._last is None:
                return False
            block = self.slots[self._last.slot]
            written = block.version, self._last.slot, block.published_ns
            if written != self._last or block.builds_on != NEVER:
                return False
            self._offer_last()
        self.wake()
        return True

    def held(self) -> set[int]:
        near = self.near.held() if self.near is not None else set()
        with self._lock:
            ways = [self._on_the_way, self._next, *(way for way, _, _ in self._answers)]
            return near | {way.slot for way in ways if way is not None}

    def kept(self) -> set[int]:
        return self.held() | ({self._last.slot} if self._last is not None else set())

    def news_fds(self) -> list[int]:
        assert self.hub is not None
        return [self.hub.bell.fd]

    @property
    def answer_bell(self) -> Doorbell | None:
        return None if self.hub is None else self.hub.bell

    def overdue(self, seconds: float) -> WorkerTimeout:
        assert self.hub is not None
        assert self.hub.engine is not None
        who = self.hub.engine.describe(self.worker_idx)
        if not self.connected:
            return WorkerTimeout(
                self.worker_idx,
                f"{self} did not connect within {seconds:g} s: does {who} call init_on_receiver() "
                f"and connect()?{self._hint}",
            )
        return WorkerTimeout(
            self.worker_idx,
            f"{self} did not acknowledge version {self.addressed} within {seconds:g} s; {who} is "
            f"not known to be dead, and is on version {self.acknowledged}{self._hint}",
        )

    _hint = ""

    def setup_connection_and_weights_on_sender(self) -> None:
        assert self.hub is not None
        came = self.hub.await_worker(self.worker_idx, self.timeout)
        try:
            where = came.result(self.timeout)
        except PeerDied as error:
            raise WorkerDied(self.worker_idx, f"{self} died: {error}") from error
        except TimeoutError:
            where = ABSENT
        if where == ABSENT:
            raise self.overdue(self.timeout)

    def close(self) -> None:
        """Tell the worker; `closing` ends when it has heard."""
        hub = self.hub
        if self.near is not None:
            self.near.close()
        if hub is not None and hub.engine is not None and not self._dead and self._where != NEAR:
            self.closing = hub.engine.call(self.worker_idx, relay.close, self.key, self.worker_idx)

    closing: Future[Any] | None = None

    # -- the receiver's end

    def become_receiver(self) -> None:
        self.slots = SlotsElsewhere(self.slots.layout)  # also in a process forked from the sender's
        super().become_receiver()
        expect_worker((self.key, self.worker_idx))

    def nearest(self) -> Transport:
        near = None if self.address is None else ask(self.address, self.worker_idx)
        if near is None:
            return self
        relay.forget(self.key, self.worker_idx)
        # It comes by plain pickle; these came with the scheme, and may be of any class.
        near.strategy, near.device, near.label = self.strategy, self.device, self.label
        near.become_receiver()
        # Another that has not ended is still it, though the trainer gave it up.
        return near if near.slots.claim(self.worker_idx) else self

    def greet(self) -> None:
        self._inbox = Inbox((self.key, self.worker_idx))

    def may_take_at_once(self, take: Callable[[], bool]) -> None:
        self.inbox.take_at_once = take

    @property
    def inbox(self) -> Inbox:
        assert self._inbox is not None
        return self._inbox

    def newest(self) -> tuple[Snapshot, int] | None:
        inbox = self.inbox
        if not inbox.closed:
            inbox.bell.silence()  # before the look: what comes later rings again
        block = inbox.block
        return None if block is None else (self._arrived(block), 0)

    def _arrived(self, block: Tensor) -> Snapshot:
        layout = self.slots.layout
        if self.zero_copy or not block.numel() == layout.nbytes < _LANDING_BYTES:
            return _snapshot(layout, block)
        if self._landing is None:
            self._landing = Snapshot(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
        self._landing.buffer.copy_(block)
        return self._landing

    def has_news(self) -> bool:
        return self._inbox is not None and self._inbox.block is not None

    def applied(self, event: Event) -> None:
        took_ns = event.applied_ns - event.seen_ns
        self.inbox.answer(DONE, event.version, took_ns, event.retries)

    def refused(self, version: int, text: str) -> None:
        self.inbox.answer(FAILED, version, text=text)

    def offer_fds(self) -> list[int]:
        return [self.inbox.bell.fd]

    def sender_gone(self) -> bool:
        return bool(self.inbox.closed)

    def leave(self) -> None:
        if self._inbox is not None:
            relay.forget(self.key, self.worker_idx)
            self._inbox.leave()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "slots": SlotsElsewhere(self.slots.layout)}


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def _snapshot(layout: Layout, block: Tensor) -> Snapshot:
    """The snapshot that `_travelling` sent."""
    if block.numel() < layout.nbytes:
        whole = torch.zeros(layout.nbytes, dtype=torch.uint8)
        whole[: block.numel()] = block
        snapshot = Snapshot(layout, whole)
        extra = len(snapshot.extra)
        if extra:
            start, filled = layout.extra_offset, block.numel() - extra
            whole[start : start + extra] = block[filled:].clone()
        return snapshot
    return Snapshot(layout, block)
