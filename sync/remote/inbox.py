"""The worker's half of a remote scheme: where versions arrive in a peer's process.

    the engine's thread                         the worker
    -------------------                         ----------
    deliver(no block, key, worker, "")  <-----  opens its inbox
      JOINED, with the inbox's owner id
    deliver(v1, key, worker, owner)     ----->  take(): v1
      (the future is not done yet)      <-----  answer(APPLIED)
      APPLIED

`deliver` never waits. It returns a future, whose result the engine sends to the trainer. A block
for another owner than the inbox's was meant for a predecessor: it is dropped, and the answer is
JOINED.
"""

from __future__ import annotations

import os
import threading
import uuid
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sync.channel_interface import FAILED, JOINED, LEFT, Answer, ReceiverChannel
from sync.local.waiting import Doorbell
from sync.model.block import NEVER, Layout, Snapshot
from sync.remote.pickled_calls import as_tensor

SUPERSEDED = "superseded"  # a newer version came before the worker took this one
NOTHING = np.empty(0, np.uint8)  # in the place of a block: who is there?


class Reply(NamedTuple):
    """The result of a delivery. owner: the id of the inbox that replies; each has another."""

    answer: Answer
    owner: str = ""


class _Arrival(NamedTuple):
    block: Tensor
    reply: Future[Reply]


_lock = threading.RLock()  # guards the places and all inboxes of this process
# By a scheme's key and a worker's number: its inbox; the delivery that waits for one; or what it
# replies after it was closed.
_places: dict[tuple[str, int], Inbox | Future[Reply] | Reply] = {}


class Inbox(ReceiverChannel):
    """Holds one version that the worker has not taken yet, and one that it is applying.

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
        with _lock:
            if isinstance(_places.get(self._place), Reply):
                del _places[self._place]  # deliveries wait for this inbox from now on

    def open(self) -> None:
        self.owner = uuid.uuid4().hex
        self._closed, self._bell, self._refusal = "", Doorbell(), None
        with _lock:
            asked, _places[self._place] = _places.get(self._place), self
        if isinstance(asked, Future):
            asked.set_result(self._joined())

    def put(self, block: Tensor, owner: str) -> Future[Reply]:
        """A version for the worker with this owner id."""
        arrival = _Arrival(block, Future())
        if owner != self.owner:
            arrival.reply.set_result(self._joined())
        elif self._refusal is not None or self._closed:
            self._finish(self._refusal or LEFT, arrival)
        else:
            older, self._newest = self._newest, arrival
            self._finish(SUPERSEDED, older)
            self._ring()
        return arrival.reply

    def take(self) -> Snapshot | None:
        if not self._closed and self._bell is not None:
            self._bell.silence()  # before the look, so that a later ring is not lost
        with _lock:
            if self._newest is None:
                return None
            self._finish(SUPERSEDED, self._taken)
            self._taken, self._newest = self._newest, None
            return Snapshot(self.layout, self._taken.block)

    def answer(self, answer: Answer) -> None:
        """What became of the block that was taken; FAILED with NEVER refuses all later ones."""
        with _lock:
            ended, self._taken = [self._taken], None
            if answer.kind == FAILED and answer.version == NEVER:
                self._refusal = answer
                ended.append(self._newest)
                self._newest = None
            self._finish(answer, *ended)

    def has_news(self) -> bool:
        return self._newest is not None

    def fds(self) -> list[int]:
        return [] if self._bell is None else [self._bell.fd]

    def sender_gone(self) -> str:
        return self._closed

    def end(self, why: str) -> None:
        """Nothing more will come; wakes the worker."""
        with _lock:
            self._closed = self._closed or why
            ended = self._taken, self._newest
            self._taken = self._newest = None
            self._finish(LEFT, *ended)
        self._ring()

    def close(self) -> None:
        if self._bell is None:
            return
        with _lock:
            if _places.get(self._place) is self:
                _places[self._place] = Reply(self._refusal or Answer(self.worker, LEFT))
            self.end("the worker left")
        self._bell.close()
        self._bell = None

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    def _joined(self) -> Reply:
        return Reply(Answer(self.worker, JOINED, pid=os.getpid()), self.owner)

    def _finish(self, answer: Answer | str, *arrivals: _Arrival | None) -> None:
        if isinstance(answer, str):
            answer = Answer(self.worker, answer)
        for arrival in arrivals:
            if arrival is not None:
                arrival.reply.set_result(Reply(answer, self.owner))


def deliver(block: Any, key: str, worker: int, owner: str) -> Future[Reply]:
    """Bring a version to a worker of this process; the future ends in its answer.

    With `NOTHING` for a block it asks who is there. If the worker has not come yet, the future
    waits for it: the newest one for the worker ends in JOINED, older ones end in SUPERSEDED.
    """
    reply = Future[Reply]()
    with _lock:
        here = _places.get((key, worker))
        if isinstance(here, Inbox):
            return here.put(as_tensor(block), owner)
        if isinstance(here, Reply):
            reply.set_result(here)
            return reply
        _places[key, worker] = reply
    if here is not None:
        here.set_result(Reply(Answer(worker, SUPERSEDED)))
    return reply


def close_inbox(key: str, worker: int) -> None:
    """The trainer shut its scheme down: nothing more will come for this worker."""
    _end((key, worker), "the trainer shut its scheme down")


def close_all(why: str) -> None:
    """The trainer cannot be reached any more: tell every worker of this process."""
    for place in list(_places):
        _end(place, why)


def _end(place: tuple[str, int], why: str) -> None:
    with _lock:
        here = _places.get(place)
        if not isinstance(here, Inbox):
            _places.pop(place, None)
    if isinstance(here, Inbox):
        here.end(why)
    elif isinstance(here, Future):
        here.set_result(Reply(Answer(place[1], LEFT)))
