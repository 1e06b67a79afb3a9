"""A pool of snapshots in one piece of anonymous shared memory, and workers' homes in another.

The pool has more slots than could ever be in use at once, so that a sender never waits for a
reader; but the machine gives memory only to slots that were written, and the sender writes the
lowest free one. With readers that keep up, two or three slots cost memory.
"""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sync.board import Event, now_ns
from sync.home import HOME_BYTES, Home, Turns
from sync.layout import Layout
from sync.memory import AnonymousMemory
from sync.snapshot import Snapshot


class Slots:
    """`capacity` snapshots of one layout. Writable where they were made, read-only elsewhere.

    homes: how many workers' models may live in blocks of their own here, if they are small.
    """

    def __init__(self, layout: Layout, capacity: int, *, homes: int = 0):
        self.layout = layout
        self.capacity = capacity
        self.homes = homes if layout.nbytes <= HOME_BYTES else 0
        self._stride = -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = AnonymousMemory(self._stride * capacity)
        # Memory apart: a process that closes a descriptor of one gives back its claims there.
        self._homes_memory = AnonymousMemory(self._stride * self.homes) if self.homes else None
        self._writable = True
        self._forget()

    def _forget(self) -> None:
        """Set what belongs to one process, and travels to no other, to its beginnings."""
        self._mapped: dict[int, Snapshot] = {}
        self._homes: dict[int, Snapshot] = {}
        self._all_homes: Tensor | None = None
        self._turns: Turns | None = None

    def __getitem__(self, slot: int) -> Snapshot:
        if slot not in self._mapped:
            buffer = self._memory.map(slot * self._stride, self._stride, writable=self._writable)
            self._mapped[slot] = Snapshot(self.layout, buffer)
        return self._mapped[slot]

    def free(self, held: set[int]) -> int:
        """The lowest slot that nobody holds."""
        for slot in range(self.capacity):
            if slot not in held:
                return slot
        raise AssertionError(f"all {self.capacity} slots are held: one is held and not let go")

    def claim(self, worker_idx: int) -> bool:
        """Make this process the one reader of that number; False if a living one is it already.

        The kernel gives the claim back when the process ends, however it ends.
        """
        try:
            fcntl.lockf(self._memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, worker_idx)
        except BlockingIOError:
            return False
        return True

    def give_back(self, worker_idx: int) -> None:
        if self._memory.fd >= 0:  # else it was cleared away first, and that gave it back
            fcntl.lockf(self._memory.fd, fcntl.LOCK_UN, 1, worker_idx)

    # -- homes

    def home(self, worker_idx: int, tell: Callable[[int], None]) -> Home | None:
        """That worker's home, for itself; None if there is none, or if this system has no such."""
        if self._homes_memory is None:
            return None
        try:
            turns = Turns(self._homes_memory)
        except OSError:
            return None
        memory = self._homes_memory.map(worker_idx * self._stride, self._stride, writable=True)
        return Home(Snapshot(self.layout, memory), turns, worker_idx, tell)

    def home_of(self, worker_idx: int) -> Snapshot:
        """The block of that worker's home, for the sender, who may write it in its `turns`."""
        block = self._homes.get(worker_idx)
        if block is None:
            assert self._homes_memory is not None
            if self._all_homes is None:  # all in one, since every mapping takes a descriptor
                nbytes = self._homes_memory.nbytes
                self._all_homes = self._homes_memory.map(0, nbytes, writable=True)
            start = worker_idx * self._stride
            block = Snapshot(self.layout, self._all_homes[start : start + self._stride])
            self._homes[worker_idx] = block
        return block

    def put_home(self, worker_idx: int, slot: int, may: Callable[[Snapshot], bool]) -> Event | None:
        """Put a slot into the model of a worker that rests: what it would say of it, or None.

        may: asked for the last time when nobody else touches the model, which is in that block.
        """
        begun = now_ns()
        try:
            turns, home = self.turns, self.home_of(worker_idx)
        except OSError:  # no descriptors are left: it has to be told
            return None
        if not turns.take(worker_idx):
            return None
        try:
            if not may(home):
                return None
            block = self[slot]
            home.become(block)
        finally:
            turns.give(worker_idx)
        return Event(block.version, block.published_ns, begun, now_ns(), 0)

    @property
    def turns(self) -> Turns:
        """The sender's."""
        if self._turns is None:
            assert self._homes_memory is not None
            self._turns = Turns(self._homes_memory)
        return self._turns

    @property
    def memory_bytes(self) -> int:
        """How much memory the pool has taken from the machine so far."""
        return len(self._mapped) * self._stride

    def read_only(self) -> Slots:
        """The same memory, seen as a reader sees it."""
        twin = Slots.__new__(Slots)
        twin.__dict__.update(self.__dict__, _writable=False)
        twin._forget()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return self.read_only().__dict__
