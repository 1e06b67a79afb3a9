"""Where versions arrive in a peer's process: one inbox for each worker that lives there.

    the engine's thread                            the worker
    -------------------                            ----------
    deliver(no block, key, worker, "")   <-----    opens its inbox
      JOINED, with the inbox's owner id
    deliver(v1, key, worker, owner, 1)   ----->    take(): v1
      (the future is not done yet)       <-----    answer(APPLIED)
      APPLIED

`deliver` never waits. It returns a future, whose result the engine sends to the trainer. A block
for another owner than the inbox's was meant for a predecessor: it is dropped, and the answer is
JOINED. Deliveries have serial numbers, because one may come on two ways (`relay.py`): it is taken
once, and one that a later one has overtaken is dropped.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Collection
from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from sync.channel import FAILED, JOINED, LEFT, Answer
from sync.local.doorbell import Doorbell
from sync.model.snapshot import NEVER

SUPERSEDED = "superseded"  # a newer delivery came before the worker took this one
_Place = tuple[str, int]  # a scheme's key and a worker's number


class Reply(NamedTuple):
    """The result of a delivery.

    owner: the id of the inbox that replies; the next process, or the next scheme in this process,
        has another.
    """

    answer: Answer
    owner: str = ""


class _Delivery(NamedTuple):
    block: Tensor
    reply: Future[Reply]


_lock = threading.RLock()  # guards the three below
_inboxes: dict[_Place, Inbox] = {}
_expected: dict[_Place, Future[Reply]] = {}  # deliveries for workers that have no inbox yet
_left: dict[_Place, Reply] = {}  # what those that left reply


class Inbox:
    """Holds one version that the worker has not taken yet, and one that it is applying.

    closed: why nothing more will come; empty until then.
    bell: readable when there is a new version, or nothing more will come.
    """

    def __init__(self, key: str, worker: int):
        self.owner = uuid.uuid4().hex
        self.bell = Doorbell()
        self.closed = ""
        self._place, self._worker = (key, worker), worker
        self._refusal: Answer | None = None
        self._newest: _Delivery | None = None
        self._taken: _Delivery | None = None
        self._serial, self._reply = 0, Future[Reply]()  # of the delivery that came last
        self._changing = threading.RLock()
        with _lock:
            _inboxes[self._place] = self
            _left.pop(self._place, None)
            expected = _expected.pop(self._place, None)
        if expected is not None:
            expected.set_result(self._joined())

    def put(self, block: Tensor, owner: str, serial: int | None) -> Future[Reply]:
        """Called by the engine: a block for the worker with this owner id."""
        if owner != self.owner:
            return _finished(self._joined())
        with self._changing:
            if serial is not None and serial <= self._serial:
                if serial == self._serial:
                    return self._reply
                return _finished(Reply(Answer(self._worker, SUPERSEDED), self.owner))
            if self._refusal is not None:
                return _finished(Reply(self._refusal, self.owner))
            if self.closed:
                return _finished(Reply(Answer(self._worker, LEFT)))
            older, self._newest = self._newest, _Delivery(block, Future())
            reply = self._newest.reply
            if serial is not None:
                self._serial, self._reply = serial, reply
        self.bell.ring()
        self._finish([older], SUPERSEDED)
        return reply

    def take(self) -> Tensor | None:
        """The newest block, if the worker has not taken it yet."""
        if not self.closed:
            self.bell.silence()  # before the look, so that a later ring is not lost
        with self._changing:
            if self._newest is None:
                return None
            older, self._taken, self._newest = self._taken, self._newest, None
            block = self._taken.block
        self._finish([older], SUPERSEDED)
        return block

    def has_news(self) -> bool:
        """Whether there is a block that was not taken yet."""
        return self._newest is not None

    def answer(self, answer: Answer) -> None:
        """What became of the block that was taken; FAILED with NEVER refuses all later ones."""
        with self._changing:
            deliveries = [self._taken]
            self._taken = None
            if answer.kind == FAILED and answer.version == NEVER:
                self._refusal = answer
                deliveries.append(self._newest)
                self._newest = None
        self._finish(deliveries, answer)

    def close(self, why: str) -> None:
        """Nothing more will come; wakes the worker."""
        with self._changing:
            self.closed = self.closed or why
            deliveries = [self._taken, self._newest]
            self._taken = self._newest = None
        self.bell.ring()
        self._finish(deliveries, LEFT)

    def leave(self) -> None:
        """Close for good: the worker takes no more versions."""
        last = self._refusal or Answer(self._worker, LEFT)
        with _lock:
            if _inboxes.get(self._place) is self:
                del _inboxes[self._place]
                _left[self._place] = Reply(last)
        self.close("the worker left")
        self.bell.close()

    def _joined(self) -> Reply:
        return Reply(Answer(self._worker, JOINED, pid=os.getpid()), self.owner)

    def _finish(self, deliveries: list[_Delivery | None], answer: Answer | str) -> None:
        if isinstance(answer, str):
            answer = Answer(self._worker, answer)
        for delivery in deliveries:
            if delivery is not None:
                delivery.reply.set_result(Reply(answer, self.owner))


def deliver(
    block: Tensor, key: str, worker: int, owner: str, serial: int | None = None
) -> Future[Reply]:
    """Bring a block to a worker of this process; the future ends in its answer.

    serial: numbers deliveries with a block; of two with the same number, only one is taken.
    If the worker has not come yet, the future waits for it: the newest one for the worker ends in
    JOINED, older ones end in SUPERSEDED.
    """
    place, reply = (key, worker), Future[Reply]()
    with _lock:
        inbox, left = _inboxes.get(place), _left.get(place)
        if inbox is None and left is None:
            older, _expected[place] = _expected.get(place), reply
    if inbox is not None:
        return inbox.put(block, owner, serial)
    if left is not None:
        return _finished(left)
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
    _close([(key, worker)], "the trainer shut its scheme down")


def close_all(why: str) -> None:
    """The trainer cannot be reached any more: tell every worker of this process."""
    with _lock:
        places = {*_inboxes, *_expected}
    _close(places, why)


def _close(places: Collection[_Place], why: str) -> None:
    for place in places:
        with _lock:
            inbox, expected = _inboxes.get(place), _expected.pop(place, None)
        if inbox is not None:
            inbox.close(why)
        if expected is not None:
            expected.set_result(Reply(Answer(place[1], LEFT)))


def _finished(reply: Reply) -> Future[Reply]:
    future: Future[Reply] = Future()
    future.set_result(reply)
    return future
