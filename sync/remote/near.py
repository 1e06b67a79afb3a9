"""A worker on the trainer's machine: it reads the trainer's slots, as under shared memory.

All that `shared_mem.py` promises holds here. What is added: it came by an engine, whose line may
go down though both processes live; and the trainer's end is a part of the line over that engine.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from sync.board import Board, Event
from sync.remote.inbox import Door
from sync.remote.nearby import Counter
from sync.shared_mem import SharedMemTransport
from sync.slots import Slots

if TYPE_CHECKING:
    from sync.remote.transport import RemoteTransport


class NearTransport(SharedMemTransport):
    """The row of one worker, if it is near."""

    def __init__(self, slots: Slots, board: Board, key: str, worker_idx: int, *, timeout: float):
        super().__init__(slots, board, worker_idx, timeout=timeout)
        self.key = key

    def _forget(self) -> None:
        super()._forget()
        self._owner: Callable[[], RemoteTransport | None] = _nobody
        self._door: Door | None = None

    # -- the sender's end

    def become_part_of(self, owner: RemoteTransport) -> None:
        """What the worker says is booked there."""
        self._owner = weakref.ref(owner)  # or only a collection would end it, and the memory

    @property
    def owner(self) -> RemoteTransport:
        owner = self._owner()
        assert owner is not None
        return owner

    def greeted(self, pid: int) -> None:
        self.owner.found_near(pid)
        self.watch = self.owner.watch

    def heard(self, event: Event) -> None:
        self.owner.heard_near(event)

    def failed(self, version: int, text: str) -> None:
        self.owner.failed(version, text)

    def left(self) -> None:
        self.owner.left()

    @property
    def greetings(self) -> int:
        """How many were met here."""
        return self._greetings

    def expect_another(self, than: int) -> None:
        """What the one met as number `than` still says is no news, and its model is not written.

        Unless another is there already, whose words those are.
        """
        row = self.row
        if row.greetings == self._greetings == than:
            self.watch = None
            self._events, self._errors, self._left = row.event_count, row.error_count, row.greetings

    def handed_out(self) -> Self:
        """What the worker's process is given."""
        return self.alone()

    # -- the receiver's end

    def greet(self) -> None:
        super().greet()
        self._door = Door((self.key, self.worker_idx), self.row.bell.ring)

    @contextlib.contextmanager
    def dozing(self) -> Iterator[None]:
        with super().dozing():
            yield
        if self._door is not None and self._door.closed:  # every later wait must hear it too
            self.row.bell.ring()

    def sender_gone(self) -> bool:
        return bool(self._door is not None and self._door.closed) or super().sender_gone()

    def refused(self, version: int, text: str) -> None:
        super().refused(version, text)
        if self._door is not None and version < 0:
            self._door.refusal = text

    def leave(self) -> None:
        if self._door is not None:
            self._door.leave()
        super().leave()


def _nobody() -> None:
    return None


class Neighbours:
    """The trainer's side of all workers that may be near: a row each, and where they ask for it."""

    def __init__(self, slots: Slots, key: str, num_workers: int, timeout: float):
        board = Board(num_workers)
        self.bell = board.sender_bell
        self.rows = {
            worker: NearTransport(slots, board, key, worker, timeout=timeout)
            for worker in range(num_workers)
        }
        rows = self.rows  # not this object, which has the counter
        self._counter = Counter(lambda w: rows[w].handed_out() if w in rows else None)
        self.address = self._counter.address

    def open(self) -> None:
        self._counter.open()

    def close(self) -> None:
        self._counter.close()
