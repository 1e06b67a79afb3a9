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
version is packed once for all workers, and the engine decides how it travels.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
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
from sync.remote.blocks import give_back
from sync.remote.engine import Engine, PackedBlock, PeerDied
from sync.remote.inbox import Inbox, Reply, close_inbox, deliver, expect_worker

_CLOSE_S = 2.0
_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Version:
    """A published block. It is packed when it is posted first, for all its workers."""

    def __init__(self, block: Snapshot):
        self.block = block
        self.version, self.published_ns = block.version, block.published_ns
        self._packed: PackedBlock | None = None

    def packed(self, engine: Engine) -> PackedBlock:
        if self._packed is None:
            self._packed = engine.pack_block(_filled_part(self.block))
        return self._packed


@dataclass
class _Peer:
    """What is known about the process that serves as a worker.

    owner: the id of its inbox; empty if it is not known.
    term: counts what ends the responsibility for earlier deliveries: a loss, or a rendezvous.
    """

    owner: str = ""
    lost: bool = False
    term: int = 0
    on_the_way: _Delivery | None = None
    waiting: _Version | None = None


@dataclass(eq=False)
class _Delivery:
    """A version, or nothing but the question who is there, on its way to a worker."""

    worker: int
    term: int
    version: _Version | None


class RemoteSender(SenderChannel):
    """The trainer's half. `engine` is set before anything is published."""

    def __init__(self, layout: Layout, num_workers: int):
        super().__init__(layout, num_workers)
        self.engine: Engine | None = None
        self.handout = self._key = uuid.uuid4().hex
        self._bell = Doorbell()
        # By the ids of their blocks, as long as they wait or are on their way.
        self._published: WeakValueDictionary[int, _Version] = WeakValueDictionary()
        self._peers: dict[int, _Peer] = {}  # those that were spoken to
        self._pending: set[_Delivery] = set()
        self._ended: deque[tuple[_Delivery, Future[Reply], int]] = deque()
        self._closed = False

    def blocks_in_use(self) -> list[Snapshot]:
        versions = [delivery.version for delivery in self._pending]
        versions += [peer.waiting for peer in self._peers.values()]
        return [version.block for version in versions if version is not None]

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        version = self._published.get(id(block))
        if version is None or version.published_ns != block.published_ns:  # it was written again
            version = self._published[id(block)] = _Version(block)
        for worker in workers:
            peer = self._peers.setdefault(worker, _Peer())
            if not peer.lost:
                peer.waiting = version
                self._post_next(worker, peer)

    # -- what is on its way

    def _post_next(self, worker: int, peer: _Peer) -> None:
        """Send what waits, unless something is on its way. First of all, ask who is there."""
        if peer.on_the_way is not None or peer.waiting is None:
            return
        if not peer.owner:
            self._post(worker, peer, None)
            return
        version, peer.waiting = peer.waiting, None
        self._post(worker, peer, version)

    def _post(self, worker: int, peer: _Peer, version: _Version | None) -> None:
        delivery = peer.on_the_way = _Delivery(worker, peer.term, version)
        self._pending.add(delivery)
        owner = peer.owner if version is not None else ""
        try:
            future = self._send(worker, version, owner)
        except Exception as error:  # noqa: BLE001 - a full object store, say
            error.add_note("The version could not be sent.")
            future = Future()
            future.set_exception(error)

        def note(future: Future[Reply]) -> None:
            """Called in a thread of the engine."""
            self._ended.append((delivery, future, now_ns()))
            self._bell.ring()

        future.add_done_callback(note)

    def _send(self, worker: int, version: _Version | None, owner: str) -> Future[Reply]:
        assert self.engine is not None, "attach() comes first"
        if version is None:
            packed = self.engine.pack_block(_NOTHING)
        else:
            packed = version.packed(self.engine)
            self.count_moved(version.block.wire_bytes, packed.mechanism)
        return self.engine.post(worker, deliver, packed, self._key, worker, owner)

    # -- answers

    def poll(self) -> list[Answer]:
        answers: list[Answer] = []
        if self._closed:
            return answers
        self._bell.silence()  # before the look, so that a later ring is not lost
        while self._ended:
            delivery, future, heard_ns = self._ended.popleft()
            self._pending.discard(delivery)
            answers += self._end(delivery, future, heard_ns)
        for worker, peer in self._peers.items():
            if not peer.lost and (why := self._gone(worker)):
                answers.append(self._lose(worker, peer, why))
            self._post_next(worker, peer)
        return answers

    def _end(self, delivery: _Delivery, future: Future[Reply], heard_ns: int) -> Iterator[Answer]:
        worker, peer, version = delivery.worker, self._peers[delivery.worker], delivery.version
        if peer.on_the_way is delivery:
            peer.on_the_way = None
        is_current = delivery.term == peer.term and not peer.lost
        error = future.exception()
        if isinstance(error, PeerDied) and version is not None:  # it may still be being sent
            self._pool = [block for block in self._pool if block is not version.block]
        if error is None:
            reply = future.result()
            if is_current or reply.owner == peer.owner != "":
                yield from self._heard(delivery, peer, reply, heard_ns)
        elif is_current and isinstance(error, PeerDied):
            yield self._lose(worker, peer, str(error))
        elif is_current:
            if version is None:
                peer.waiting = None
            text = "\n".join([f"{type(error).__name__}: {error}", *_notes(error)])
            yield Answer(worker, FAILED, version.version if version else NEVER, text=text)

    def _heard(
        self, delivery: _Delivery, peer: _Peer, reply: Reply, heard_ns: int
    ) -> Iterator[Answer]:
        answer, version = reply.answer, delivery.version
        if answer.kind == JOINED and reply.owner != peer.owner:
            peer.owner, peer.waiting = reply.owner, None  # it waited for the predecessor
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
            yield answer

    def _gone(self, worker: int) -> str:
        assert self.engine is not None
        why = self.engine.gone(worker)
        return "" if why is None else f"{self.engine.describe(worker)} is gone: {why}"

    def _lose(self, worker: int, peer: _Peer, why: str) -> Answer:
        peer.lost, peer.owner, peer.waiting, peer.on_the_way = True, "", None, None
        peer.term += 1
        return Answer(worker, LOST, text=f"died: {why}")

    # -- the rest of the interface

    def fds(self) -> list[int]:
        return [] if self._closed else [self._bell.fd]

    def busy(self) -> bool:
        return any(peer.waiting is not None for peer in self._peers.values())

    def expect(self, worker: int) -> None:
        """Ask who is there, although something may be on its way to the predecessor."""
        peer = self._peers.setdefault(worker, _Peer())
        peer.lost = False
        peer.term += 1
        self._post(worker, peer, None)

    def rendezvous_pending(self, worker: int) -> bool:
        """Whether it is not known yet which process serves as the worker."""
        peer = self._peers.get(worker)
        return peer is not None and peer.on_the_way is not None and peer.on_the_way.version is None

    def describe(self, worker: int) -> str:
        return "" if self.engine is None else self.engine.describe(worker)

    def hint(self, worker: int) -> str:
        return "" if self.engine is None else self.engine.hint

    def close(self) -> None:
        """Tell the workers, and wait a moment for all of them together."""
        if self._closed:
            return
        self._closed = True
        engine = self.engine
        if engine is not None:
            told = [
                engine.call(worker, close_inbox, self._key, worker)
                for worker, peer in self._peers.items()
                if not peer.lost and engine.gone(worker) is None
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
        self._taken = _NOTHING
        expect_worker(key, worker)

    @property
    def inbox(self) -> Inbox:
        """Where versions arrive."""
        assert self._inbox is not None, "open() comes first"
        return self._inbox

    def open(self) -> None:
        self._inbox = Inbox(self._key, self.worker)

    def take(self) -> Snapshot | None:
        part = self.inbox.take()
        if part is None:
            return None
        self._taken = part
        return _snapshot(part, self.layout)

    def answer(self, answer: Answer) -> None:
        taken, self._taken = self._taken, _NOTHING
        give_back(taken)
        self.inbox.answer(answer)

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
