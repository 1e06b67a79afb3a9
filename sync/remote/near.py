"""A worker on the trainer's machine: it reads the trainer's slots, as under shared memory.

All that `shared_mem.py` promises holds here. What is added: it came by an engine, whose line may
go down though both processes live; and the trainer's end is a part of the line over that engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
        self._owner: RemoteTransport | None = None
        self._door: Door | None = None

    # -- the sender's end

    def become_part_of(self, owner: RemoteTransport) -> None:
        """What the worker says is booked there."""
        self._owner = owner

    @property
    def owner(self) -> RemoteTransport:
        assert self._owner is not None
        return self._owner

    def greeted(self, pid: int) -> None:
        self.owner.found_near(pid)
        self.watch = self.owner.watch

    def heard(self, event: Event) -> None:
        self.owner.heard_near(event)

    def failed(self, version: int, text: str) -> None:
        self.owner.failed(version, text)

    def left(self) -> None:
        self.owner.left()

    def handed_out(self) -> Self:
        """What the worker's process is given."""
        owner, twin = self.owner, self.alone()
        twin.strategy, twin.device, twin.label = owner.strategy, owner.device, owner.label
        return twin

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


class Neighbours:
    """The trainer's side of all workers that may be near: a row each, and where they ask for it."""

    def __init__(self, slots: Slots, key: str, num_workers: int, timeout: float):
        board = Board(num_workers)
        self.bell = board.sender_bell
        self.rows = {
            worker: NearTransport(slots, board, key, worker, timeout=timeout)
            for worker in range(num_workers)
        }
        self._counter = Counter(self._hand_out)
        self.address = self._counter.address

    def _hand_out(self, worker: int) -> NearTransport | None:
        row = self.rows.get(worker)
        return None if row is None else row.handed_out()

    def close(self) -> None:
        self._counter.close()
