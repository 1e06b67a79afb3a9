"""Where snapshots arrive in a peer's process: one inbox for each worker that lives there.

A worker that reads the trainer's own memory (`nearby.py`) has no more than a door here: by it the
trainer learns that it is there, and it learns that the line to the trainer is down.

the engine's thread                       the worker
-------------------                       ----------
deliver(block, key, worker)
  waits for the worker's inbox   <-----   opens it when it greets
  lays the block down, and applies it if the model rests and the worker has said that it may; else
  rings                           ---->   looks, or is woken
  answers `Later`: waits         <-----   applied, or refused: the answer
returns the answer: the trainer's future is the acknowledgement
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from sync.memory import Doorbell
from sync.remote.wire import Later
from sync.snapshot import NEVER

DONE, FAILED, LEFT, ABSENT, SUPERSEDED, MISSING, NEAR, FAR = range(8)
Place = tuple[str, int]  # a scheme's key, and a worker's number


class Answer(NamedTuple):
    """What became of a delivery; `took_ns` is what applying took, by the worker's clock."""

    kind: int
    owner: str = ""
    pid: int = 0
    version: int = NEVER
    took_ns: int = 0
    retries: int = 0
    text: str = ""


class Door:
    """A worker of this process that can be found by its place.

    closed: why nothing more comes, once that is so.
    """

    near = True
    refusal = ""  # why it can take nothing, if it said so

    def __init__(self, place: Place, ring: Callable[[], None]):
        self.place = place
        self.closed = ""
        self._ring = ring
        with _registry:
            _doors[place] = self
            _departed.pop(place, None)
            _registry.notify_all()

    def put(self, block: Tensor) -> Answer | Later:
        """Bring a block here; the worker's answer, or how to wait for it."""
        return Answer(NEAR)

    def close(self, why: str) -> None:
        """Nothing more will come; wakes the worker."""
        self.closed = self.closed or why
        self._ring()

    def leave(self) -> None:
        """The worker reads no more."""
        with _registry:
            if _doors.get(self.place) is self:
                del _doors[self.place]
                _departed[self.place] = self.refusal
        self.close("the worker left")


class Inbox(Door):
    """Room for one block that its worker has not answered to yet."""

    near = False

    def __init__(self, place: Place):
        self.owner = uuid.uuid4().hex
        self.bell = Doorbell()
        self.block: Tensor | None = None
        self.take_at_once: Callable[[], bool] | None = None
        self._answer: Answer | None = None
        self._changed = threading.Condition()
        super().__init__(place, self.bell.ring)

    def put(self, block: Tensor) -> Answer | Later:
        with self._changed:
            if self.refusal:
                return Answer(FAILED, self.owner, os.getpid(), text=self.refusal)
            self.block, self._answer = block, None
            self._changed.notify_all()  # whoever put the one before
        if self.take_at_once is not None and self.take_at_once():
            return self._answer_to(block)
        self.bell.ring()
        return Later(partial(self._answer_to, block))

    def _answer_to(self, block: Tensor) -> Answer:
        with self._changed:
            while self.block is block and not self.closed:
                self._changed.wait(60.0)
            if self.block is block:
                self.block = None
                return Answer(LEFT)
            if self.block is not None or self._answer is None:
                return Answer(SUPERSEDED)
            return self._answer

    def answer(
        self, kind: int, version: int, took_ns: int = 0, retries: int = 0, text: str = ""
    ) -> None:
        """What became of the block that lies here, which makes room for the next."""
        with self._changed:
            if version == NEVER:  # the model cannot take any
                self.refusal = text
            self._answer = Answer(kind, self.owner, os.getpid(), version, took_ns, retries, text)
            self.block = None
            self._changed.notify_all()

    def close(self, why: str) -> None:
        with self._changed:
            self.closed = self.closed or why
            self._changed.notify_all()
        super().close(why)


_registry = threading.Condition()
_doors: dict[Place, Door] = {}
_departed: dict[Place, str] = {}  # workers that left, and why if they could not take any


def expect_worker(place: Place) -> None:
    """A worker will open its door here, perhaps where another has left: wait for it."""
    with _registry:
        _departed.pop(place, None)


def deliver(block: Tensor, key: str, worker: int, patience_s: float) -> Answer | Later:
    """Give a worker of this process a snapshot; its answer, or how to wait for it.

    patience_s: how long to wait for a worker that has not come yet.
    """
    with _registry:
        door = _doors.get((key, worker))
    if door is not None:
        return door.put(block)
    return Later(partial(_deliver_later, block, (key, worker), patience_s))


def _deliver_later(block: Tensor, place: Place, patience_s: float) -> Answer | Later:
    with _registry:
        _registry.wait_for(lambda: place in _doors or place in _departed, patience_s)
        door = _doors.get(place)
    if door is None:
        if why := _departed.get(place):
            return Answer(FAILED, text=why)
        return Answer(LEFT if place in _departed else ABSENT)
    return door.put(block)


def await_worker(key: str, worker: int, patience_s: float) -> int:
    """Where that worker takes versions, once it is there: NEAR or FAR; ABSENT if it does not come.

    One that has left is FAR: whoever brings it a version will be told why.
    """
    place = key, worker
    with _registry:
        _registry.wait_for(lambda: place in _doors or place in _departed, patience_s)
        if (door := _doors.get(place)) is not None:
            return NEAR if door.near else FAR
        return FAR if place in _departed else ABSENT


def close_inbox(key: str, worker: int) -> None:
    """The trainer says that nothing more will come."""
    with _registry:
        door = _doors.get((key, worker))
    if door is not None:
        door.close("the trainer shut its scheme down")


def hang_up(why: str) -> None:
    """The line to the trainer is down: tell every worker of this process."""
    with _registry:
        doors = list(_doors.values())
    for door in doors:
        door.close(why)
