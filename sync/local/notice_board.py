"""The notice board of the shared-memory scheme: a few 64-bit words for each worker.

`latest` names the block that holds the newest version. The two pins name the blocks that the worker
reads, so that the sender does not overwrite them. Every word has a single writer, except `asleep`,
which the sender clears when it wakes the worker. Reads and writes of an aligned 64-bit word are
atomic. `fence` orders a store before a later load of another word.

    sender                                worker
    ------                                ------
    block = one that is not pinned
    write the version into it ; fence
    latest = (version, block) ; fence     word = latest
    asleep? wake the worker               pin = block of word ; fence
                                          latest is still word? else again
                                          copy the block, or point at it ; fence
                                          pin = FREE
"""

from __future__ import annotations

import os

from sync.local.memory import AnonymousMemory, SharedFd, as_bytes
from sync.model.block import Snapshot

FREE = -1
_LATEST, _PINS, _ASLEEP, _CHECKED, _TORN = 0, 1, 3, 4, 5
_ROW_WORDS = 8  # 64 bytes: no two workers write to one cache line


def word_of(version: int, block: int) -> int:
    """A version and the number of its block, in one 64-bit word, as `latest` holds them."""
    return (version + 1) << 16 | block


def version_and_block(word: int) -> tuple[int, int]:
    """The opposite of `word_of`."""
    return (word >> 16) - 1, word & 0xFFFF


class Fence(SharedFd):
    """A store-load barrier between processes.

    `fence()` orders memory accesses on every kind of processor: all earlier writes of this process
    to shared memory are visible to other processes before its later reads. Python has no such
    instruction. Writing to an eventfd that all processes share takes the kernel's lock of that
    object, and a process that takes the lock sees what earlier holders wrote. A process that is
    stopped or killed cannot keep that lock.

    fd: the descriptor of another process's fence.
    """

    def __init__(self, fd: int | None = None):
        super().__init__(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd)

    def __call__(self) -> None:
        os.eventfd_write(self.fd, 1)  # its 64-bit counter does not fill up


class Board:
    """One row of words for each worker, in new memory or in the `memory` of another process."""

    def __init__(
        self, num_workers: int, memory: AnonymousMemory | None = None, fence: Fence | None = None
    ):
        nbytes = num_workers * _ROW_WORDS * 8
        self.memory = memory or AnonymousMemory(nbytes)
        self.fence = fence or Fence()
        words = as_bytes(self.memory.map(0, self.memory.nbytes, writable=True)).cast("q")
        self.rows = [
            Row(words[i * _ROW_WORDS : (i + 1) * _ROW_WORDS], self.fence)
            for i in range(num_workers)
        ]

    def close(self) -> None:
        self.rows.clear()
        self.memory.close()


class Row:
    """One worker's words. Methods are grouped by the side that calls them."""

    def __init__(self, words: memoryview, fence: Fence):
        self._words = words
        self._fence = fence

    # -- the sender's side

    def clear(self) -> None:
        """Prepare the row for another process: nothing is announced or pinned."""
        self._words[_PINS] = self._words[_PINS + 1] = FREE
        self._words[_LATEST] = self._words[_ASLEEP] = 0

    def announce(self, block: Snapshot) -> None:
        self._words[_LATEST] = word_of(block.version, block.number)

    def clear_asleep(self) -> bool:
        """Clear the word `asleep`; returns whether the worker was asleep and has to be woken."""
        asleep = bool(self._words[_ASLEEP])
        if asleep:
            self._words[_ASLEEP] = 0
        return asleep

    def held(self) -> set[int]:
        """The blocks that this worker reads or may be about to read."""
        words = self._words
        held = {words[_PINS], words[_PINS + 1]}
        if words[_LATEST]:
            held.add(version_and_block(words[_LATEST])[1])
        return held

    @property
    def uses(self) -> tuple[int, int]:
        """How many uses of the model were checked for tearing, and how many were torn."""
        return self._words[_CHECKED], self._words[_TORN]

    # -- the worker's side

    @property
    def latest(self) -> int:
        return self._words[_LATEST]

    def pin(self, which: int) -> tuple[int, int]:
        """Pin the newest block; returns its word, and how often that changed meanwhile."""
        words = self._words
        for retries in range(1_000_000):
            word = words[_LATEST]
            words[_PINS + which] = word & 0xFFFF
            self._fence()
            if words[_LATEST] == word:
                return word, retries
        raise AssertionError("`latest` changed a million times while one word was read")

    def unpin(self, which: int) -> None:
        self._fence()  # all reads of the block come before this store
        self._words[_PINS + which] = FREE

    def sleep(self, asleep: bool) -> None:
        """Ask the sender to wake this worker by a message, or not. Check for news afterwards."""
        self._words[_ASLEEP] = int(asleep)
        if asleep:
            self._fence()

    def count_use(self, *, torn: bool) -> None:
        self._words[_CHECKED] += 1
        self._words[_TORN] += torn
