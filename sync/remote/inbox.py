"""The worker's half of a remote scheme: where versions arrive in a peer's process.

    the engine's thread                            the worker
    -------------------                            ----------
    deliver(no block, key, worker, "")   <-----    opens its inbox
      JOINED, with the inbox's owner id
    deliver(v1, key, worker, owner, 1)   ----->    take(): v1
      (the future is not done yet)       <-----    answer(APPLIED)
      APPLIED

`deliver` never waits. It returns a future, whose result the engine sends to the trainer. A block
for another owner than the inbox's was meant for a predecessor: it is dropped, and the answer is
JOINED. A version may come on two ways (`tree.py`): it is taken once, and one that a later version
has overtaken is dropped.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Collection
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from sync.channel import FAILED, JOINED, LEFT, Answer, ReceiverChannel
from sync.local.waiting import Doorbell
from sync.model.block import NEVER, Layout, Snapshot
from sync.remote.engine import give_back

SUPERSEDED = "superseded"  # a newer version came before the worker took this one
MISSING = "missing"  # the version has not arrived here
NOTHING = torch.empty(0, dtype=torch.uint8)  # in the place of a block: only a question
_Place = tuple[str, int]  # a scheme's key and a worker's number


class Reply(NamedTuple):
    """The result of a delivery.

    owner: the id of the inbox that replies; the next process, or the next scheme in this process,
        has another.
    held_ns: how long nodes have kept it back (`tree.py`).
    """

    answer: Answer
    owner: str = ""
    held_ns: int = 0


class _Arrival(NamedTuple):
    block: Tensor
    reply: Future[Reply]


_lock = threading.RLock()  # guards the three below
_inboxes: dict[_Place, Inbox] = {}
_expected: dict[_Place, Future[Reply]] = {}  # deliveries for workers that have no inbox yet
_left: dict[_Place, Reply] = {}  # what those that left reply


class Inbox(ReceiverChannel):
    """Holds one version that the worker has not taken yet, and one that it is applying.

    Blocks are the worker's own, or never written.

    owner: names this inbox from when it is opened.
    """

    def __init__(self, key: str, layout: Layout, worker: int):
        super().__init__(key, layout, worker)
        self.owner = ""
        self._place = key, worker
        self._closed = "the worker left"  # why nothing more will come; empty until then
        self._bell: Doorbell | None = None  # rings for a new version, and when nothing more comes
        self._refusal: Answer | None = None
        self._newest: _Arrival | None = None
        self._taken: _Arrival | None = None
        self._version, self._reply = NEVER, Future[Reply]()  # of the version that came last
        self._changing = threading.RLock()
        expect_worker(key, worker)

    def open(self) -> None:
        self.owner = uuid.uuid4().hex
        self._closed, self._bell, self._refusal = "", Doorbell(), None
        self._version = NEVER
        with _lock:
            _inboxes[self._place] = self
            _left.pop(self._place, None)
            expected = _expected.pop(self._place, None)
        if expected is not None:
            expected.set_result(self._joined())

    def put(self, block: Tensor, owner: str, version: int) -> Future[Reply]:
        """Called by the engine: a version for the worker with this owner id."""
        if owner != self.owner:
            return finished(self._joined())
        with self._changing:
            if version == self._version:
                return self._reply
            if version < self._version:
                return self._finished(Answer(self.worker, SUPERSEDED))
            if self._refusal is not None:
                return self._finished(self._refusal)
            if self._closed:
                return finished(Reply(Answer(self.worker, LEFT)))
            if not block.numel():
                return self._finished(Answer(self.worker, MISSING))
            older, self._newest = self._newest, _Arrival(block, Future())
            reply = self._newest.reply
            self._version, self._reply = version, reply
        self._ring()
        self._finish([older], SUPERSEDED)
        return reply

    def take(self) -> Snapshot | None:
        if not self._closed and self._bell is not None:
            self._bell.silence()  # before the look, so that a later ring is not lost
        with self._changing:
            if self._newest is None:
                return None
            older, self._taken, self._newest = self._taken, self._newest, None
            block = self._taken.block
        self._finish([older], SUPERSEDED)
        return _snapshot(block, self.layout)

    def answer(self, answer: Answer) -> None:
        """What became of the block that was taken; FAILED with NEVER refuses all later ones."""
        with self._changing:
            deliveries = [self._taken]
            self._taken = None
            if answer.kind == FAILED and answer.version == NEVER:
                self._refusal = answer
                deliveries.append(self._newest)
                self._newest = None
        if deliveries[0] is not None:
            give_back(deliveries[0].block)
        self._finish(deliveries, answer)

    def has_news(self) -> bool:
        return self._newest is not None

    def fds(self) -> list[int]:
        return [] if self._bell is None else [self._bell.fd]

    def sender_gone(self) -> str:
        return self._closed

    def end(self, why: str) -> None:
        """Nothing more will come; wakes the worker."""
        with self._changing:
            self._closed = self._closed or why
            deliveries = [self._taken, self._newest]
            self._taken = self._newest = None
        self._ring()
        self._finish(deliveries, LEFT)

    def close(self) -> None:
        if self._bell is None:
            return
        last = self._refusal or Answer(self.worker, LEFT)
        with _lock:
            if _inboxes.get(self._place) is self:
                del _inboxes[self._place]
                _left[self._place] = Reply(last)
        self.end("the worker left")
        self._bell.close()
        self._bell = None

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    def _joined(self) -> Reply:
        return Reply(Answer(self.worker, JOINED, pid=os.getpid()), self.owner)

    def _finished(self, answer: Answer) -> Future[Reply]:
        return finished(Reply(answer, self.owner))

    def _finish(self, deliveries: list[_Arrival | None], answer: Answer | str) -> None:
        if isinstance(answer, str):
            answer = Answer(self.worker, answer)
        for delivery in deliveries:
            if delivery is not None:
                delivery.reply.set_result(Reply(answer, self.owner))


def deliver(
    block: Tensor, key: str, worker: int, owner: str, version: int = NEVER
) -> Future[Reply]:
    """Bring a version to a worker of this process; the future ends in its answer.

    With `NOTHING` for a block it asks what the answer is, or who is there if the owner is empty.
    If the worker has not come yet, the future waits for it: the newest one for the worker ends in
    JOINED, older ones end in SUPERSEDED.
    """
    place, reply = (key, worker), Future[Reply]()
    with _lock:
        inbox, left = _inboxes.get(place), _left.get(place)
        if inbox is None and left is None:
            older, _expected[place] = _expected.get(place), reply
    if inbox is not None:
        return inbox.put(block, owner, version)
    if left is not None:
        return finished(left)
    if older is not None:
        older.set_result(Reply(Answer(worker, SUPERSEDED)))
    return reply


def expect_worker(key: str, worker: int) -> None:
    """A worker will open its inbox, perhaps where another has left: deliveries wait for it."""
    with _lock:
        _left.pop((key, worker), None)


def close_inbox(key: str, worker: int) -> None:
    """The trainer shut its scheme down: nothing more will come for this worker."""
    with _lock:
        _left.pop((key, worker), None)
    _end([(key, worker)], "the trainer shut its scheme down")


def close_all(why: str) -> None:
    """The trainer cannot be reached any more: tell every worker of this process."""
    with _lock:
        places = {*_inboxes, *_expected}
    _end(places, why)


def _end(places: Collection[_Place], why: str) -> None:
    for place in places:
        with _lock:
            inbox, expected = _inboxes.get(place), _expected.pop(place, None)
        if inbox is not None:
            inbox.end(why)
        if expected is not None:
            expected.set_result(Reply(Answer(place[1], LEFT)))


def finished(reply: Reply) -> Future[Reply]:
    """A future that has ended."""
    future: Future[Reply] = Future()
    future.set_result(reply)
    return future


def filled_part(snapshot: Snapshot) -> Tensor:
    """What of a block has to travel: all, or the filled part and what follows the leaves."""
    if snapshot.wire_bytes >= snapshot.layout.nbytes:
        return snapshot.buffer
    start, tail = snapshot.layout.extra_offset, snapshot.tail_bytes
    filled = snapshot.wire_bytes - tail
    return torch.cat([snapshot.buffer[:filled], snapshot.buffer[start : start + tail]])


def _snapshot(part: Tensor, layout: Layout) -> Snapshot:
    """The snapshot of which `filled_part` was sent; the rest of its block is not defined."""
    if part.numel() >= layout.nbytes:
        return Snapshot(layout, part)
    snapshot = Snapshot(layout, torch.empty(layout.nbytes, dtype=torch.uint8))
    snapshot.buffer[: part.numel()] = part
    tail = snapshot.tail_bytes
    if tail:
        start = layout.extra_offset
        snapshot.buffer[start : start + tail] = part[part.numel() - tail :]
    return snapshot
