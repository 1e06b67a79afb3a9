"""The two halves of a remote scheme, over any engine.

    trainer                                       the worker's process, elsewhere
    -------                                       -------------------------------
    publish v0    -- deliver(nothing) ------->    answered when the worker opens its inbox
                  <------------- JOINED ------
    publish v0    -- deliver(v0) ------------>    inbox: v0            (see inbox.py)
    publish v1       waits: v0 is on its way
    publish v2       replaces v1
                  <------------- APPLIED v0 --    the worker uses v0
                  -- deliver(v2) ------------>    inbox: v2

So at most one version is on its way to a worker and one waits, however fast the trainer is. A
version is packed once for all workers, and the engine decides how it travels. With more workers
than the trainer serves itself, nodes pass versions on (`tree.py`, `relay.py`).
"""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sync.channel import (
    APPLIED,
    FAILED,
    JOINED,
    LEFT,
    LOST,
    Answer,
    ReceiverChannel,
    SenderChannel,
    now_ns,
)
from sync.local.doorbell import Doorbell
from sync.model.layout import Layout
from sync.model.snapshot import NEVER, Snapshot
from sync.remote import relay
from sync.remote.blocks import give_back
from sync.remote.engine import Engine, PackedBlock, PeerDied
from sync.remote.inbox import Inbox, Reply, deliver, expect_worker
from sync.remote.relay import CUT, NOTHING, RECEIVED, UNREACHED, Link, News
from sync.remote.tree import Branch, Tree

_CLOSE_S = 2.0
# A version that does not come through the tree in this time is sent directly.
_PATIENCE_S = 1.0
_SLOWEST_BYTES_PER_S = 40e6


class _Version:
    """A published block. It is packed when it is posted first, for all its workers."""

    def __init__(self, block: Snapshot):
        self.block = block
        self.version, self.published_ns = block.version, block.published_ns
        self.sent_as: PackedBlock | None = None

    def packed(self, engine: Engine) -> PackedBlock:
        if self.sent_as is None:
            self.sent_as = engine.pack_block(_filled_part(self.block))
        return self.sent_as


@dataclass
class _Peer:
    """What is known about the process that serves as a worker.

    owner: the id of its inbox; empty if it is not known.
    term: counts what ends the responsibility for earlier deliveries: a loss, or a rendezvous.
    link: the way to it and to the workers below it.
    relay: the worker whose node was to pass on the newest version; None if the trainer sent it.
    """

    owner: str = ""
    lost: bool = False
    term: int = 0
    on_the_way: _Delivery | None = None
    waiting: _Version | None = None
    link: Link | None = None
    relay: int | None = None


@dataclass(eq=False)
class _Delivery:
    """A version, or nothing but the question who is there, on its way to a worker.

    above: the delivery with which another node is to pass it on; None if the trainer sends it.
    received: whether the worker's process is known to have it.
    is_direct: whether the trainer has sent it to the worker, with nothing to pass on.
    """

    worker: int
    term: int
    version: _Version | None
    serial: int
    above: _Delivery | None = None
    received: bool = False
    is_direct: bool = False


class RemoteSender(SenderChannel):
    """The trainer's half."""

    def __init__(self, layout: Layout, num_workers: int, engine: Engine):
        super().__init__(layout, num_workers)
        self.engine = engine
        self.handout = self._key = uuid.uuid4().hex
        self._bell = Doorbell()
        # By the ids of their blocks, as long as they wait or are on their way.
        self._published: WeakValueDictionary[int, _Version] = WeakValueDictionary()
        self._peers: dict[int, _Peer] = {}  # those that were spoken to
        self._serials = itertools.count(1)
        self._pending: dict[int, _Delivery] = {}  # by serial
        self._ended: deque[Callable[[], Iterator[Answer]]] = deque()  # put there by the engine
        self._tree = Tree()
        self._calls: dict[Future[Any], _Version] = {}  # that carry a version, until they return
        self._due_ns: dict[int, int] = {}  # when to send a delivery directly, by serial
        self._closed = False

    def blocks_in_use(self) -> list[Snapshot]:
        self._calls = {call: sent for call, sent in self._calls.items() if not call.done()}
        versions = [delivery.version for delivery in self._pending.values()]
        versions += [peer.waiting for peer in self._peers.values()]
        versions += self._calls.values()
        return [version.block for version in versions if version is not None]

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        version = self._published.get(id(block))
        if version is None or version.published_ns != block.published_ns:  # it was written again
            version = self._published[id(block)] = _Version(block)
        for worker in workers:
            peer = self._peers.setdefault(worker, _Peer())
            if not peer.lost:
                peer.waiting = version
        self._post_next(workers)

    # -- what is on its way

    def _post_next(self, workers: Iterable[int]) -> None:
        """Send what waits, where nothing is on its way. First of all, ask who is there."""
        going: dict[int, list[_Delivery]] = {}  # by the ids of their versions
        for worker in workers:
            peer = self._peers[worker]
            if peer.on_the_way is not None or peer.waiting is None:
                continue
            if not peer.owner:
                self._send_directly(self._begin(worker, peer, None))
                continue
            version, peer.waiting = peer.waiting, None
            going.setdefault(id(version), []).append(self._begin(worker, peer, version))
        for deliveries in going.values():
            self._send(deliveries)

    def _begin(self, worker: int, peer: _Peer, version: _Version | None) -> _Delivery:
        delivery = _Delivery(worker, peer.term, version, next(self._serials))
        peer.on_the_way = self._pending[delivery.serial] = delivery
        return delivery

    def _send(self, deliveries: Sequence[_Delivery]) -> None:
        """Send a version to all for which it is, through the tree."""
        branches = [
            Branch(one.worker, self._peers[one.worker].owner, one.serial, []) for one in deliveries
        ]
        for head in self._tree.grow(branches, self.engine):
            self._peers[head.worker].relay = None
            if head.below:
                self._send_along(head)
            else:
                self._send_directly(self._pending[head.serial])

    def _send_along(self, head: Branch) -> None:
        """Send a version to a node that passes it on."""
        engine, peer = self.engine, self._peers[head.worker]
        version = self._pending[head.serial].version
        assert version is not None
        if peer.link is None:
            peer.link = self._link(head.worker, engine)
        patience_s = _PATIENCE_S + version.block.wire_bytes / _SLOWEST_BYTES_PER_S
        due_ns = now_ns() + int(patience_s * 1e9)
        branches = list(head.all())
        for one in branches:
            self._due_ns[one.serial] = due_ns
            for other in one.below:
                self._pending[other.serial].above = self._pending[one.serial]
                self._peers[other.worker].relay = one.worker
        call = peer.link.send(partial(version.packed, engine), self._key, engine.id, head)
        self._calls[call] = version
        if version.sent_as is not None:
            mechanism = version.sent_as.mechanism
            self.count_moved(version.block.wire_bytes, mechanism, times=len(branches))

    def _link(self, worker: int, engine: Engine) -> Link:
        def post(function: Any, pack: Callable[[], PackedBlock], *args: Any) -> Future[Any]:
            return engine.post(worker, function, pack(), *args)

        def hear(news: list[News], error: BaseException | None) -> None:
            """Called in a thread of the engine."""
            self._ended.append(partial(self._note_news, news, now_ns()))
            self._bell.ring()

        return Link(post, partial(engine.pack_block, NOTHING), hear)

    def _send_directly(self, delivery: _Delivery) -> None:
        delivery.is_direct = True
        try:
            future = self._post(delivery)
        except Exception as error:  # noqa: BLE001 - a full object store, say
            error.add_note("The version could not be sent.")
            future = Future()
            future.set_exception(error)
        if delivery.version is not None:
            self._calls[future] = delivery.version

        def note(future: Future[Reply]) -> None:
            """Called in a thread of the engine."""
            self._ended.append(partial(self._note_end, delivery, future, now_ns()))
            self._bell.ring()

        future.add_done_callback(note)

    def _post(self, delivery: _Delivery) -> Future[Reply]:
        worker, version = delivery.worker, delivery.version
        if version is None:
            packed, owner = self.engine.pack_block(NOTHING), ""
        else:
            packed, owner = version.packed(self.engine), self._peers[worker].owner
            self.count_moved(version.block.wire_bytes, packed.mechanism)
        args = (self._key, worker, owner, delivery.serial)
        return self.engine.post(worker, deliver, packed, *args)

    def _send_again(self, delivery: _Delivery) -> None:
        """Send directly what did not come through the tree, unless it is for a predecessor."""
        self._due_ns.pop(delivery.serial, None)
        peer = self._peers[delivery.worker]
        if peer.on_the_way is delivery and not delivery.is_direct:
            peer.relay = None
            self._send_directly(delivery)

    def _send_overdue(self) -> None:
        """Send directly what should have come through the tree by now."""
        for serial, due_ns in list(self._due_ns.items()):
            if due_ns > now_ns():
                return
            delivery = self._pending[serial]
            if delivery.above is not None and delivery.above.received:
                self._tree.cut(delivery.worker)
            self._send_again(delivery)

    # -- answers

    def poll(self) -> list[Answer]:
        answers: list[Answer] = []
        if self._closed:
            return answers
        self._bell.silence()  # before the look, so that a later ring is not lost
        while self._ended:
            answers += self._ended.popleft()()
        for worker, peer in self._peers.items():
            if not peer.lost and (why := self.engine.gone(worker)) is not None:
                why = f"{self.describe(worker)} is gone: {why}"
                answers.append(self._lose(worker, peer, why))
        self._send_overdue()
        self._post_next(self._peers)
        return answers

    def _note_end(
        self, delivery: _Delivery, future: Future[Reply], heard_ns: int
    ) -> Iterator[Answer]:
        """A delivery by the trainer itself has ended."""
        ended = future.exception() or future.result()
        if isinstance(ended, PeerDied):
            self._stop_using(delivery)
        if self._finish(delivery):
            yield from self._end(delivery, ended, heard_ns)

    def _note_news(self, news: Sequence[News], heard_ns: int) -> Iterator[Answer]:
        """What is known of deliveries through the tree."""
        for one in news:
            delivery = self._pending.get(one.serial)
            if one.what == CUT:
                self._tree.cut(one.worker)
            elif delivery is None:  # it has come on another way
                continue
            elif isinstance(one.what, Reply):
                if self._finish(delivery):
                    yield from self._end(delivery, one.what, heard_ns - one.held_ns)
            elif one.what == RECEIVED:
                delivery.received = True
                self._due_ns.pop(one.serial, None)
            elif one.what == UNREACHED:
                self._stop_using(delivery)
                self._send_again(delivery)
                if not delivery.is_direct:
                    self._finish(delivery)

    def _stop_using(self, delivery: _Delivery) -> None:
        """Its block may still be being sent: it is never written again."""
        if (version := delivery.version) is not None:
            self._pool = [block for block in self._pool if block is not version.block]

    def _finish(self, delivery: _Delivery) -> bool:
        """Nothing more is expected of it; returns whether something was until now."""
        delivery.received = True
        self._due_ns.pop(delivery.serial, None)
        peer = self._peers[delivery.worker]
        if peer.on_the_way is delivery:
            peer.on_the_way = None
        return self._pending.pop(delivery.serial, None) is not None

    def _end(
        self, delivery: _Delivery, ended: Reply | BaseException, heard_ns: int
    ) -> Iterator[Answer]:
        worker, peer, version = delivery.worker, self._peers[delivery.worker], delivery.version
        is_current = delivery.term == peer.term and not peer.lost
        if isinstance(ended, Reply):
            if is_current or ended.owner == peer.owner != "":
                yield from self._heard(delivery, peer, ended, heard_ns)
        elif is_current and isinstance(ended, PeerDied):
            yield self._lose(worker, peer, str(ended))
        elif is_current:
            if version is None:
                peer.waiting = None
            text = "\n".join([f"{type(ended).__name__}: {ended}", *_notes(ended)])
            yield Answer(worker, FAILED, version.version if version else NEVER, text=text)

    def _heard(
        self, delivery: _Delivery, peer: _Peer, reply: Reply, heard_ns: int
    ) -> Iterator[Answer]:
        answer, version = reply.answer, delivery.version
        if answer.kind == JOINED and reply.owner != peer.owner:
            peer.owner, peer.waiting = reply.owner, None  # it waited for the predecessor
            self._tree.join(delivery.worker, self.engine)
            yield answer
        elif answer.kind == APPLIED and version is not None:
            # Clocks differ between machines: times since the publication are measured here.
            seen_ns = heard_ns - (answer.applied_ns - answer.seen_ns)
            yield answer._replace(
                published_ns=version.published_ns,
                seen_ns=max(version.published_ns, seen_ns),
                applied_ns=heard_ns,
            )
        elif answer.kind in (FAILED, LEFT):
            if answer.kind == LEFT or version is None:
                peer.owner, peer.waiting = "", None
                self._tree.leave(delivery.worker)
            yield answer

    def _lose(self, worker: int, peer: _Peer, why: str) -> Answer:
        peer.lost, peer.owner, peer.waiting, peer.on_the_way = True, "", None, None
        peer.term += 1
        peer.link = None
        self._tree.leave(worker)
        return Answer(worker, LOST, text=f"died: {why}")

    # -- the rest of the interface

    def fds(self) -> list[int]:
        return [] if self._closed else [self._bell.fd]

    def busy(self) -> bool:
        return bool(self._due_ns) or any(peer.waiting for peer in self._peers.values())

    def due_ns(self) -> int | None:
        return next(iter(self._due_ns.values()), None)

    def expect(self, worker: int) -> None:
        """Ask who is there, although something may be on its way to the predecessor."""
        peer = self._peers.setdefault(worker, _Peer())
        peer.lost, peer.link = False, None
        peer.term += 1
        self._send_directly(self._begin(worker, peer, None))

    def rendezvous_pending(self, worker: int) -> bool:
        """Whether it is not known yet which process serves as the worker."""
        peer = self._peers.get(worker)
        return peer is not None and peer.on_the_way is not None and peer.on_the_way.version is None

    def describe(self, worker: int) -> str:
        return self.engine.describe(worker)

    def hint(self, worker: int) -> str:
        return self.engine.hint

    def stats(self, worker: int) -> dict[str, Any]:
        return {"relay": self._peers[worker].relay if worker in self._peers else None}

    def close(self) -> None:
        """Tell the workers, and wait a moment for all of them together."""
        if self._closed:
            return
        self._closed = True
        told = [
            self.engine.call(worker, relay.close, self._key, worker)
            for worker, peer in self._peers.items()
            if not peer.lost and self.engine.gone(worker) is None
        ]
        wait(told, timeout=_CLOSE_S)
        self._bell.close()
        self._peers.clear()
        self._pool.clear()


class RemoteReceiver(ReceiverChannel):
    """The worker's half: an inbox of its process. Blocks are the worker's own, or never written."""

    def __init__(self, key: str, layout: Layout, worker: int):
        super().__init__(key, layout, worker)
        self._key = key
        self._inbox: Inbox | None = None
        self._taken = NOTHING
        expect_worker(key, worker)

    def open(self) -> None:
        self._inbox = Inbox(self._key, self.worker)

    def take(self) -> Snapshot | None:
        assert self._inbox is not None, "open() comes first"
        part = self._inbox.take()
        if part is None:
            return None
        self._taken = part
        return _snapshot(part, self.layout)

    def answer(self, answer: Answer) -> None:
        assert self._inbox is not None, "open() comes first"
        taken, self._taken = self._taken, NOTHING
        give_back(taken)
        self._inbox.answer(answer)

    def has_news(self) -> bool:
        return self._inbox is not None and self._inbox.has_news()

    def fds(self) -> list[int]:
        return [] if self._inbox is None else [self._inbox.bell.fd]

    def sender_gone(self) -> str:
        return "the worker left" if self._inbox is None else self._inbox.closed

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.leave()
            self._inbox = None


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def _filled_part(snapshot: Snapshot) -> Tensor:
    """What of a block has to travel: all, or the filled part and what follows the leaves."""
    if snapshot.wire_bytes >= snapshot.layout.nbytes:
        return snapshot.buffer
    start, tail = snapshot.layout.extra_offset, snapshot.tail_bytes
    filled = snapshot.wire_bytes - tail
    return torch.cat([snapshot.buffer[:filled], snapshot.buffer[start : start + tail]])


def _snapshot(part: Tensor, layout: Layout) -> Snapshot:
    """The snapshot of which `_filled_part` was sent; the rest of its block is not defined."""
    if part.numel() >= layout.nbytes:
        return Snapshot(layout, part)
    snapshot = Snapshot(layout, torch.empty(layout.nbytes, dtype=torch.uint8))
    snapshot.buffer[: part.numel()] = part
    tail = snapshot.tail_bytes
    if tail:
        start = layout.extra_offset
        snapshot.buffer[start : start + tail] = part[part.numel() - tail :]
    return snapshot
