"""The trainer's half of a remote scheme, over any engine. The worker's half is its inbox.

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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from sync.channel import (
    APPLIED,
    FAILED,
    JOINED,
    LATER,
    LEFT,
    LOST,
    About,
    Answer,
    SenderChannel,
    now_ns,
)
from sync.local.waiting import Doorbell
from sync.model.block import NEVER, Layout, Snapshot
from sync.remote.engine import Engine, PackedBlock, PeerDied
from sync.remote.inbox import NOTHING, Reply, close_inbox, deliver, filled_part

_CLOSE_S = 2.0


class Version:
    """A published block. It is packed when it is posted first, for all its workers."""

    def __init__(self, block: Snapshot):
        self.block = block
        self.number, self.published_ns = block.version, block.published_ns
        self._packed: PackedBlock | None = None

    def packed(self, engine: Engine) -> PackedBlock:
        if self._packed is None:
            self._packed = engine.pack_block(filled_part(self.block))
        return self._packed


@dataclass(eq=False)
class Delivery:
    """A version, or nothing but the question who is there, on its way to a worker.

    relay: the delivery with which another node passes it on; None if the trainer sends it.
    is_asked: whether the trainer has asked for its answer, which did not come through the relay.
    was_missing: whether the trainer has sent it since, because it had not arrived.
    """

    worker: int
    version: Version | None
    has_ended: bool = False
    relay: Delivery | None = None
    is_asked: bool = False
    was_missing: bool = False


@dataclass
class Peer:
    """The process that serves as a worker. owner: the id of its inbox; empty if unknown."""

    owner: str = ""
    lost: bool = False
    on_the_way: Delivery | None = None
    waiting: Version | None = None


class RemoteSender(SenderChannel):
    """Delivers versions to inboxes, and asks who opens one."""

    def __init__(self, layout: Layout, num_workers: int, engine: Engine):
        super().__init__(layout, num_workers)
        self.engine, self.mechanism = engine, engine.mechanism
        self.handout = self.key = uuid.uuid4().hex
        self.bell = Doorbell()
        # By the ids of their blocks, as long as they wait or are on their way.
        self._published: WeakValueDictionary[int, Version] = WeakValueDictionary()
        self.peers: dict[int, Peer] = {}  # of the workers to which something was published
        # Deliveries that ended, with the time: the engine's threads add to them.
        self.ended: deque[tuple[Delivery, Future[Reply], int]] = deque()
        self.calls: dict[Future[Any], Version] = {}  # that carry a version, until they return
        self._closed = False

    def blocks_in_use(self) -> list[Snapshot]:
        self.calls = {call: version for call, version in self.calls.items() if not call.done()}
        versions = list(self.calls.values())
        for peer in self.peers.values():
            on_the_way = peer.on_the_way.version if peer.on_the_way is not None else None
            versions += [one for one in (peer.waiting, on_the_way) if one is not None]
        return [version.block for version in versions]

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        version = self._published.get(id(block))
        if version is None or version.published_ns != block.published_ns:  # it was written again
            version = self._published[id(block)] = Version(block)
        for worker in workers:
            peer = self.peers.setdefault(worker, Peer())
            if not peer.lost:
                peer.waiting = version
        self._send_next(workers)

    # -- what is on its way

    def _send_next(self, workers: Iterable[int]) -> None:
        """Send what waits, where nothing is on its way. First of all, ask who is there."""
        going: dict[int, list[Delivery]] = {}  # by the ids of their versions
        for worker in workers:
            peer = self.peers[worker]
            if peer.on_the_way is not None or peer.waiting is None:
                continue
            version = None
            if peer.owner:
                version, peer.waiting = peer.waiting, None
            peer.on_the_way = Delivery(worker, version)
            going.setdefault(id(version), []).append(peer.on_the_way)
        for deliveries in going.values():
            self.send(deliveries)

    def send(self, deliveries: Sequence[Delivery]) -> None:
        """Send one version to all for which it is."""
        for delivery in deliveries:
            self.send_to_worker(delivery)

    def send_to_worker(self, delivery: Delivery, *, with_block: bool = True) -> None:
        """Without the block, ask for the answer to a version that came on another way."""
        version = delivery.version if with_block else None
        try:
            future = self._post(delivery, version)
        except Exception as error:  # noqa: BLE001 - a full object store, say
            error.add_note("The version could not be sent.")
            future = Future()
            future.set_exception(error)
        if version is not None:
            self.calls[future] = version

        def note(future: Future[Reply]) -> None:
            """Called in a thread of the engine."""
            self.ended.append((delivery, future, now_ns()))
            self.bell.ring()

        future.add_done_callback(note)

    def _post(self, delivery: Delivery, version: Version | None) -> Future[Reply]:
        worker, owner, number = delivery.worker, "", NEVER
        if delivery.version is not None:
            owner, number = self.peers[worker].owner, delivery.version.number
        if version is None:
            packed = self.engine.pack_block(NOTHING)
        else:
            packed = version.packed(self.engine)
            self.count_moved(version.block.wire_bytes, packed.mechanism)
        return self.engine.post(worker, deliver, packed, self.key, worker, owner, number)

    # -- answers

    def poll(self) -> list[Answer]:
        answers: list[Answer] = []
        if self._closed:
            return answers
        self.bell.silence()  # before the look, so that a later ring is not lost
        while self.ended:
            delivery, future, heard_ns = self.ended.popleft()
            if not delivery.has_ended:
                answers += self.note_end(delivery, future, heard_ns)
        for worker, peer in self.peers.items():
            if not peer.lost and (why := self.engine.gone(worker)) is not None:
                why = f"{self.engine.describe(worker)} is gone: {why}"
                answers.append(self._lose(worker, peer, why))
        self._send_next(self.peers)
        return answers

    def note_end(
        self, delivery: Delivery, future: Future[Reply], heard_ns: int
    ) -> Iterator[Answer]:
        """A delivery has ended; an answer counts if it is of the process that serves now."""
        worker, peer, version = delivery.worker, self.peers[delivery.worker], delivery.version
        ended = future.exception() or future.result()
        if isinstance(ended, PeerDied) and version is not None:
            self.never_write(version)
        delivery.has_ended = True
        is_current = peer.on_the_way is delivery
        if is_current:
            peer.on_the_way = None
        if isinstance(ended, Reply):
            if is_current or ended.owner == peer.owner != "":
                yield from self._heard(delivery, peer, ended, heard_ns - ended.held_ns)
        elif is_current and isinstance(ended, PeerDied):
            yield self._lose(worker, peer, str(ended))
        elif is_current:
            if version is None:
                peer.waiting = None
            text = "\n".join([f"{type(ended).__name__}: {ended}", *_notes(ended)])
            yield Answer(worker, FAILED, version.number if version else NEVER, text=text)

    def never_write(self, version: Version) -> None:
        """Its block may still be being sent, although its peer is gone."""
        self._pool = [block for block in self._pool if block is not version.block]

    def _heard(
        self, delivery: Delivery, peer: Peer, reply: Reply, heard_ns: int
    ) -> Iterator[Answer]:
        answer, version = reply.answer, delivery.version
        if answer.kind == JOINED and reply.owner != peer.owner:
            peer.owner, peer.waiting = reply.owner, None  # it waited for the predecessor
            self.note_joined(delivery.worker)
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
                self.note_left(delivery.worker)
            yield answer

    def _lose(self, worker: int, peer: Peer, why: str) -> Answer:
        peer.lost, peer.owner, peer.waiting, peer.on_the_way = True, "", None, None
        self.note_left(worker)
        return Answer(worker, LOST, text=f"died: {why}")

    def note_joined(self, worker: int) -> None:
        """A process now serves as the worker."""

    def note_left(self, worker: int) -> None:
        """No process serves as the worker any more."""

    # -- the rest of the interface

    def fds(self) -> list[int]:
        return [] if self._closed else [self.bell.fd]

    def due_ns(self) -> int | None:
        """Versions that wait are sent when an answer comes."""
        return LATER if any(peer.waiting for peer in self.peers.values()) else None

    def meet(self, worker: int) -> None:
        """Ask who is there, although something may be on its way to the predecessor."""
        peer = self.peers.setdefault(worker, Peer())
        peer.lost, peer.on_the_way = False, Delivery(worker, None)
        self.send_to_worker(peer.on_the_way)

    def about(self, worker: int) -> About:
        peer = self.peers.get(worker)
        on_the_way = None if peer is None else peer.on_the_way
        is_unknown = on_the_way is not None and on_the_way.version is None
        return About(self.engine.describe(worker), self.engine.hint, is_unknown=is_unknown)

    def close(self) -> None:
        """Tell the workers, and wait a moment for all of them together."""
        if self._closed:
            return
        self._closed = True
        calls = [
            self.engine.call(worker, close_inbox, self.key, worker)
            for worker, peer in self.peers.items()
            if not peer.lost and self.engine.gone(worker) is None
        ]
        wait(calls, timeout=_CLOSE_S)
        self.bell.close()
        self.peers.clear()
        self._pool.clear()


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))
