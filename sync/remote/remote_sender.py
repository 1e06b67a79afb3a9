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

So at most one version is on its way to a worker and one waits, however fast the trainer is.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sync.channel_interface import (
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
from sync.remote.engine import Engine, PeerDied
from sync.remote.inbox import NOTHING, Reply, close_inbox, deliver

_CLOSE_S = 2.0


class _Version:
    """A published block. It is shared when it is sent first, for all its workers."""

    def __init__(self, block: Snapshot, engine: Engine):
        self.block, self._engine = block, engine
        self.number, self.published_ns = block.version, block.published_ns

    @cached_property
    def shared(self) -> Any:
        return self._engine.share(self.block.buffer)


@dataclass
class _Peer:
    """The process that serves as a worker. owner: the id of its inbox; empty if unknown.

    asks: whether what is on its way is only the question who is there.
    """

    owner: str = ""
    lost: bool = False
    on_the_way: Future[Reply] | None = None
    asks: bool = False
    waiting: _Version | None = None


class RemoteSender(SenderChannel):
    """Delivers versions to inboxes, and asks who opens one."""

    def __init__(self, layout: Layout, num_workers: int, engine: Engine):
        super().__init__(layout, num_workers)
        self.engine, self.mechanism = engine, engine.mechanism
        self.handout = self.key = uuid.uuid4().hex
        self._bell = Doorbell()
        self._peers: dict[int, _Peer] = {}  # of the workers to which something was published
        # Calls that ended, with the time: the engine's threads add to them.
        self._ended: deque[tuple[int, Future[Reply], _Version | None, int]] = deque()
        self._carriers: dict[Future[Any], _Version] = {}  # calls that carry a version
        self._closed = False

    def blocks_in_use(self) -> list[Snapshot]:
        self._carriers = {call: one for call, one in self._carriers.items() if not call.done()}
        waiting = (peer.waiting for peer in self._peers.values())
        versions = [*self._carriers.values(), *(one for one in waiting if one is not None)]
        return [version.block for version in versions]

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        version = _Version(block, self.engine)
        for worker in workers:
            peer = self._peers.setdefault(worker, _Peer())
            if not peer.lost:
                peer.waiting = version
        self._send_next(workers)

    def _send_next(self, workers: Iterable[int]) -> None:
        """Send what waits, where nothing is on its way. First of all, ask who is there."""
        for worker in workers:
            peer = self._peers[worker]
            if peer.on_the_way is None and peer.waiting is not None:
                version = None
                if peer.owner:
                    version, peer.waiting = peer.waiting, None
                self._send(worker, peer, version)

    def _send(self, worker: int, peer: _Peer, version: _Version | None) -> None:
        try:
            shared = NOTHING if version is None else version.shared
            owner = "" if version is None else peer.owner
            call = self.engine.call(worker, deliver, shared, self.key, worker, owner)
        except Exception as error:  # noqa: BLE001 - a full object store, say
            error.add_note("The version could not be sent.")
            call = Future()
            call.set_exception(error)
        peer.on_the_way, peer.asks = call, version is None
        if version is not None:
            self._carriers[call] = version
            self.count_moved(version.block.nbytes)

        def note(call: Future[Reply]) -> None:
            """Called in a thread of the engine."""
            self._ended.append((worker, call, version, now_ns()))
            self._bell.ring()

        call.add_done_callback(note)

    # -- answers

    def poll(self) -> list[Answer]:
        answers: list[Answer] = []
        if self._closed:
            return answers
        self._bell.silence()  # before the look, so that a later ring is not lost
        while self._ended:
            answers += self._note_end(*self._ended.popleft())
        for worker, peer in self._peers.items():
            if not peer.lost and (why := self.engine.gone(worker)) is not None:
                answers.append(self._lose(worker, f"{self.engine.describe(worker)} is gone: {why}"))
        self._send_next(self._peers)
        return answers

    def _note_end(
        self, worker: int, call: Future[Reply], version: _Version | None, heard_ns: int
    ) -> Iterator[Answer]:
        """A call has ended; its answer counts if it is of the process that serves now."""
        peer, error = self._peers[worker], call.exception()
        if isinstance(error, PeerDied) and version is not None:  # it may still be being sent
            self._pool = [block for block in self._pool if block is not version.block]
        is_current = peer.on_the_way is call
        if is_current:
            peer.on_the_way = None
        if error is None:
            reply = call.result()
            if is_current or reply.owner == peer.owner != "":
                yield from self._heard(worker, peer, reply, version, heard_ns)
        elif is_current and isinstance(error, PeerDied):
            yield self._lose(worker, str(error))
        elif is_current:
            if version is None:
                peer.waiting = None
            text = "\n".join([f"{type(error).__name__}: {error}", *_notes(error)])
            yield Answer(worker, FAILED, version.number if version else NEVER, text=text)

    def _heard(
        self, worker: int, peer: _Peer, reply: Reply, version: _Version | None, heard_ns: int
    ) -> Iterator[Answer]:
        answer = reply.answer
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

    def _lose(self, worker: int, why: str) -> Answer:
        self._peers[worker] = _Peer(lost=True)
        return Answer(worker, LOST, text=f"died: {why}")

    # -- the rest of the interface

    def fds(self) -> list[int]:
        return [] if self._closed else [self._bell.fd]

    def due_ns(self) -> int | None:
        """Versions that wait are sent when an answer comes."""
        return LATER if any(peer.waiting for peer in self._peers.values()) else None

    def meet(self, worker: int) -> None:
        """Ask who is there, although something may be on its way to the predecessor."""
        peer = self._peers.setdefault(worker, _Peer())
        peer.lost = False
        self._send(worker, peer, None)

    def about(self, worker: int) -> About:
        peer = self._peers.get(worker, _Peer())
        is_unknown = peer.on_the_way is not None and peer.asks
        return About(self.engine.describe(worker), self.engine.hint, is_unknown=is_unknown)

    def close(self) -> None:
        """Tell the workers, and wait a moment for all of them together."""
        if self._closed:
            return
        self._closed = True
        calls = [
            self.engine.call(worker, close_inbox, self.key, worker)
            for worker, peer in self._peers.items()
            if not peer.lost and self.engine.gone(worker) is None
        ]
        wait(calls, timeout=_CLOSE_S)
        self._bell.close()
        self._peers.clear()
        self._pool.clear()


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))
