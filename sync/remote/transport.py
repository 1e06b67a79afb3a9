"""One worker's line over an engine: a call that returns when the version is in use.

    trainer                                   the worker's process
    -------                                   --------------------
    offer v1    -- deliver(block) -------->   inbox: v1          (see inbox.py)
    offer v2       waits: v1 is on its way
    offer v3       takes v2's place
                <------ v1 is in use          receive()
                -- deliver(block) -------->   inbox: v3

So at most one version is on its way to a worker and one waits, whatever the trainer's pace. The
block of a version is handed to the engine once for all workers; it decides how it travels.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sync import interrupts
from sync.board import Event, now_ns
from sync.errors import WorkerDied, WorkerTimeout
from sync.layout import Layout
from sync.memory import Doorbell
from sync.remote import relay
from sync.remote.engine import Engine, PeerDied
from sync.remote.inbox import (
    DONE,
    FAILED,
    LEFT,
    MISSING,
    Answer,
    Inbox,
    await_worker,
    expect_worker,
)
from sync.remote.relay import Errand, keep_and_deliver, take_and_deliver
from sync.slots import Slots
from sync.snapshot import NEVER, Snapshot
from sync.transport import Transport

# Smaller blocks are copied to where there are views into each leaf: making those takes longer.
_LANDING_BYTES = 1 << 18


class Way(NamedTuple):
    """A version, its slot, and when it was published."""

    version: int
    slot: int
    published_ns: int


class Hub:
    """What all lines of one sender share: the engine, and the bell that answers ring."""

    def __init__(self, slots: Slots, key: str, num_workers: int, timeout: float, patience_s: float):
        self.engine: Engine | None = None
        self.bell = Doorbell()
        self.slots, self.key, self.num_workers = slots, key, num_workers
        self.handed_on = 0  # blocks that one peer had from another
        self._handover_s = timeout / 3  # then the trainer sends the block itself
        self._patience_s = patience_s
        self._pays = relay.pays(num_workers, slots.layout.nbytes)
        self._lock = threading.Lock()
        self._packed: tuple[int, int, Any] | None = None
        self._sent_to: set[int] = set()  # who was sent the version that is packed

    def post(self, worker: int, way: Way) -> Future[Answer]:
        """Bring a slot to a worker: from here, or from a peer that was sent the same before."""
        assert self.engine is not None
        keep = self._hands_on and relay.has_children(worker, self.num_workers)
        errand = Errand(self.key, way.version, worker, keep, self._patience_s)
        parcel, giver = self._pack(worker, way)
        if giver is not None and (route := self.engine.route(worker, giver)) is not None:
            took = self.engine.call(
                worker, take_and_deliver, route, giver, self._handover_s, errand
            )
            answer: Future[Answer] = Future()
            took.add_done_callback(partial(self._settle, errand, parcel, answer))
            return answer
        return self.engine.post(worker, keep_and_deliver, parcel, errand)

    @property
    def _hands_on(self) -> bool:
        return self._pays and self.engine is not None and self.engine.hands_on

    def _pack(self, worker: int, way: Way) -> tuple[Any, int | None]:
        """The parcel of this version, and who else than the trainer can hand it over."""
        assert self.engine is not None
        with self._lock:
            if self._packed is None or self._packed[:2] != (way.version, way.slot):
                block = _travelling(self.slots[way.slot])
                self._packed = way.version, way.slot, self.engine.parcel(block)
                self._sent_to.clear()
            giver = relay.parent(worker) if self._hands_on else None
            known = giver in self._sent_to
            self._sent_to.add(worker)
            return self._packed[2], giver if known else None

    def _settle(
        self, errand: Errand, parcel: Any, answer: Future[Answer], took: Future[Answer]
    ) -> None:
        """End `answer` as the handover ended, or as sending the block from here does."""
        assert self.engine is not None
        if took.exception() is None and took.result().kind == MISSING:
            took = _attempt(self.engine.post, errand.worker, keep_and_deliver, parcel, errand)
            took.add_done_callback(partial(_pass_on, answer))
        else:
            if took.exception() is None:
                with self._lock:
                    self.handed_on += 1
            _pass_on(answer, took)


def _attempt(post: Callable[..., Future[Answer]], *args: Any) -> Future[Answer]:
    """The future of a post, which has failed if it could not be made."""
    try:
        return post(*args)
    except Exception as error:  # noqa: BLE001 - a full object store, say
        error.add_note("The version could not be sent.")
        failed: Future[Answer] = Future()
        failed.set_exception(error)
        return failed


def _pass_on(answer: Future[Answer], took: Future[Answer]) -> None:
    if (error := took.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(took.result())


class RemoteSlots(Slots):
    """Slots that stay in the trainer's process; a worker has only their layout."""

    def claim(self, worker_idx: int) -> bool:
        return True

    def give_back(self, worker_idx: int) -> None:
        """Nothing was claimed: the trainer knows whom it calls."""

    def read_only(self) -> Slots:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "capacity": self.capacity}


class RemoteTransport(Transport):
    """The same at both ends of any engine."""

    slots: Slots

    def __init__(self, slots: Slots, key: str, worker_idx: int, *, timeout: float = 10.0):
        super().__init__(timeout=timeout)
        self.slots = slots
        self.key = key
        self.worker_idx = worker_idx

    def _forget(self) -> None:
        super()._forget()
        self.hub: Hub | None = None
        self._lock: Any = contextlib.nullcontext()
        self._on_the_way: Way | None = None
        self._next: Way | None = None
        self._last: Way | None = None
        self._answers: deque[tuple[Way, Future[Answer], int]] = deque()
        self._owner = ""
        self._dead = ""
        self._inbox: Inbox | None = None
        self._landing: Snapshot | None = None

    # -- the sender's end

    def become_sender(self, hub: Hub) -> None:
        """From now on versions can be offered."""
        self.hub = hub
        self._lock = threading.RLock()

    def offer(self, slot: int, version: int) -> None:
        with interrupts.held(), self._lock:
            self.addressed = version
            self.stats.addressed += 1
            self._next = self._last = Way(version, slot, self.slots[slot].published_ns)
            self._feed()

    def _feed(self) -> None:
        """Send what is next, unless the worker has one to answer to."""
        if self._on_the_way is not None or self._next is None or self._dead:
            return
        assert self.hub is not None
        way = self._next
        answer = _attempt(self.hub.post, self.worker_idx, way)
        self._on_the_way, self._next = way, None
        answer.add_done_callback(partial(self._answered, way))

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
        if answer.kind == DONE:
            # Clocks differ between machines: what is counted from the publication is counted here.
            seen_ns = max(way.published_ns, heard_ns - answer.took_ns)
            self.heard(Event(way.version, way.published_ns, seen_ns, heard_ns, answer.retries))
        elif answer.kind == FAILED:
            self.failed(way.version, answer.text)
        elif answer.kind == LEFT:
            self.left()

    def greeted(self, pid: int) -> None:
        super().greeted(pid)
        self.watch = None  # the process is not of this machine; the engine watches it

    def judge(self) -> None:
        super().judge()
        assert self.hub is not None
        if self.hub.engine is not None and not self._dead:
            self._dead = self.hub.engine.gone(self.worker_idx) or ""
            if self._dead:
                self._dead = f"{self.hub.engine.describe(self.worker_idx)} is gone: {self._dead}"
        if self._dead:
            self.connected = False
            self.failure = WorkerDied(self.worker_idx, f"{self} died: {self._dead}")

    def expect_newcomer(self) -> None:
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

    def offer_again(self) -> bool:
        with interrupts.held(), self._lock:
            if self._last is None:
                return False
            block = self.slots[self._last.slot]
            if block.version != self._last.version or block.builds_on != NEVER:
                return False
            self._next = self._last
            self._feed()
        return True

    def held(self) -> set[int]:
        with self._lock:
            return {way.slot for way in (self._on_the_way, self._next) if way is not None}

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
        assert self.hub.engine is not None
        wanted = self.key, self.worker_idx
        came = self.hub.engine.call(self.worker_idx, await_worker, *wanted, self.timeout)
        try:
            is_here = came.result(self.timeout)
        except PeerDied as error:
            raise WorkerDied(self.worker_idx, f"{self} died: {error}") from error
        except TimeoutError:
            is_here = False
        if not is_here:
            raise self.overdue(self.timeout)

    def close(self) -> None:
        """Tell the worker; `closing` ends when it has heard."""
        hub = self.hub
        if hub is not None and hub.engine is not None and not self._dead:
            self.closing = hub.engine.call(self.worker_idx, relay.close, self.key, self.worker_idx)

    closing: Future[Any] | None = None

    # -- the receiver's end

    def become_receiver(self) -> None:
        super().become_receiver()
        expect_worker((self.key, self.worker_idx))

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


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def _travelling(snapshot: Snapshot) -> Tensor:
    """As much of a block as has to travel."""
    if snapshot.wire_bytes >= snapshot.layout.nbytes:
        return snapshot.buffer
    start, extra = snapshot.layout.extra_offset, len(snapshot.extra)
    filled = snapshot.wire_bytes - extra
    return torch.cat([snapshot.buffer[:filled], snapshot.buffer[start : start + extra]])


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
