"""A pool of snapshots in one piece of anonymous shared memory.

The pool has more slots than could ever be in use at once, so that a sender never waits for a
reader; but the machine gives memory only to slots that were written, and the sender writes the
lowest free one. With readers that keep up, two or three slots cost memory.
"""

from __future__ import annotations

import fcntl
import mmap
from typing import Any

from sync.layout import Layout
from sync.memory import AnonymousMemory
from sync.snapshot import Snapshot


class Slots:
    """`capacity` snapshots of one layout. Writable where they were made, read-only elsewhere."""

    def __init__(self, layout: Layout, capacity: int):
        self.layout = layout
        self.capacity = capacity
        self._stride = -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = AnonymousMemory(self._stride * capacity)
        self._mapped: dict[int, Snapshot] = {}
        self._writable = True

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
        fcntl.lockf(self._memory.fd, fcntl.LOCK_UN, 1, worker_idx)

    @property
    def memory_bytes(self) -> int:
        """How much memory the pool has taken from the machine so far."""
        return len(self._mapped) * self._stride

    def read_only(self) -> Slots:
        """The same memory, seen as a reader sees it."""
        twin = Slots.__new__(Slots)
        twin.__dict__.update(self.__dict__, _mapped={}, _writable=False)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}, "_writable": False}
