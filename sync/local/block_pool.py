"""A pool of blocks in one piece of shared memory: written by the sender, read by workers.

The pool has more blocks than can ever be in use at once, so that a sender never waits for a reader.
Only blocks that were written take memory, and the sender always writes the lowest free one. If
workers keep up, only two or three blocks take memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection

from sync.local.memory import AnonymousMemory
from sync.model.layout import Layout, aligned
from sync.model.snapshot import Snapshot


class BlockPool:
    """`capacity` blocks of one layout.

    fd: the memory of another process's pool; its blocks are read-only here.
    """

    def __init__(self, layout: Layout, capacity: int, fd: int | None = None):
        self.layout = layout
        self.capacity = capacity
        self._stride = aligned(layout.nbytes, mmap.PAGESIZE)
        self._memory = AnonymousMemory(self._stride * capacity, fd)
        self._writable = fd is None
        self._mapped: dict[int, Snapshot] = {}

    @property
    def fd(self) -> int:
        return self._memory.fd

    def __getitem__(self, number: int) -> Snapshot:
        if number not in self._mapped:
            start = number * self._stride
            buffer = self._memory.map(start, self._stride, writable=self._writable)
            self._mapped[number] = Snapshot(self.layout, buffer)
            self._mapped[number].number = number
        return self._mapped[number]

    def free(self, held: Collection[int]) -> Snapshot:
        """The lowest block whose number is not `held`."""
        for number in range(self.capacity):
            if number not in held:
                return self[number]
        raise AssertionError(f"all {self.capacity} blocks are in use: one is not released")

    @property
    def memory_bytes(self) -> int:
        """How much memory the pool has taken so far."""
        return len(self._mapped) * self._stride

    def close(self) -> None:
        """Release the memory in this process. Existing views of a block keep its memory."""
        self._mapped.clear()
        self._memory.close()
