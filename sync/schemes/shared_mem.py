"""Weights through shared memory: one block per version, which every worker reads in place.

    trainer: send()                       worker: receive()
    ---------------                       -----------------
    block = one that is not pinned
    write the version into it ; fence
    latest = (version, block) ; fence     has_news(): is `latest` another word?
    asleep? wake the worker               word = latest ; pin = block of word ; fence
                                          latest is still word? else again
                                          copy the block, or point at it ; fence
    wait for all  <------------- DONE     pin = FREE

`latest`, `asleep` and the pins are words of the notice board: a few 64-bit words for each worker.
`latest` names the block that holds the newest version. The pins name the blocks that the worker
reads, so that the sender does not overwrite them. Every word has a single writer, except `asleep`,
which the sender clears when it wakes the worker. Reads and writes of an aligned 64-bit word are
atomic. `fence` orders a store before a later load of another word.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from sync.channel_interface import Answer, SenderChannel
from sync.local.memory import AnonymousMemory, BlockPool, SharedFd, as_bytes
from sync.local.unix_connection import WAKE
from sync.local.worker_connections import LocalReceiver, LocalSender
from sync.model.block import Layout, Snapshot
from sync.model.strategy import WeightStrategy
from sync.scheme import WeightSyncScheme
from sync.schemes import register

FREE = -1
_LATEST, _PINS, _ASLEEP, _CHECKED, _TORN = 0, 1, 3, 4, 5
_ROW_WORDS = 8  # 64 bytes: no two workers write to one cache line


def word_of(version: int, block: int) -> int:
    """A version and the number of its block, in one 64-bit word, as `latest` holds them."""
    return (version + 1) << 16 | block


def version_and_block(word: int) -> tuple[int, int]:
    """The opposite of `word_of`."""
    return (word >> 16) - 1, word & 0xFFFF


SEGFAULT_HINT = (
    "; did it write to its parameters? With zero_copy=True they are read-only there; "
    "zero_copy=False gives it its own"
)


class Board:
    """One row of words for each worker, in memory that the sender shares with them.

    fds: the descriptors of another process's board.
    """

    def __init__(self, num_workers: int, fds: tuple[int, int] | None = None):
        memory, fence = fds or (None, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._memory = AnonymousMemory(num_workers * _ROW_WORDS * 8, memory)
        self._eventfd = SharedFd(fence)
        words = as_bytes(self._memory.map(0, self._memory.nbytes, writable=True)).cast("q")
        self.rows = [
            Row(words[i * _ROW_WORDS : (i + 1) * _ROW_WORDS], self.fence)
            for i in range(num_workers)
        ]

    def fds(self) -> tuple[int, int]:
        """What another process needs to open the board."""
        return self._memory.fd, self._eventfd.fd

    def fence(self) -> None:
        """A store-load barrier between processes.

        It orders memory accesses on every kind of processor: all earlier writes of this process
        to shared memory are visible to other processes before its later reads. Python has no such
        instruction. Writing to an eventfd that all processes share takes the kernel's lock of that
        object, and a process that takes the lock sees what earlier holders wrote. A process that is
        stopped or killed cannot keep that lock.
        """
        os.eventfd_write(self._eventfd.fd, 1)  # its 64-bit counter does not fill up

    def close(self) -> None:
        self.rows.clear()
        self._memory.close()


class Row:
    """One worker's words. Methods are grouped by the side that calls them."""

    def __init__(self, words: memoryview, fence: Callable[[], None]):
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
        numbers = {words[_PINS], words[_PINS + 1]}
        if words[_LATEST]:
            numbers.add(version_and_block(words[_LATEST])[1])
        return numbers

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


class SharedMemSender(LocalSender):
    """Announces versions on a board that workers read on their own."""

    mechanism = "shared memory"
    keeps_last = True

    def __init__(self, layout: Layout, num_workers: int, *, zero_copy: bool = False):
        # Each worker can hold three blocks: its latest, the one in use, and the one that it
        # changes to. One more is being written.
        super().__init__(layout, num_workers, blocks_per_worker=4)
        self.board = Board(num_workers)
        self.segfault_hint = SEGFAULT_HINT if zero_copy else ""
        for row in self.board.rows:
            row.clear()

    def _shared_fds(self) -> list[int]:
        return [self.blocks.fd, *self.board.fds()]

    def _reset(self, worker: int) -> None:
        self.board.rows[worker].clear()

    def free_block(self, keep: Collection[Snapshot]) -> Snapshot:
        numbers = {block.number for block in keep}
        for row in self.board.rows:
            numbers |= row.held()
        return self.blocks.free(numbers)

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        present = [worker for worker in workers if worker in self._workers]
        rows = self.board.rows
        self.board.fence()  # the block is visible before it is announced
        for worker in present:
            rows[worker].announce(block)
        self.board.fence()  # the announcement is visible before the words `asleep` are read
        for worker in present:
            if rows[worker].clear_asleep():
                self._workers[worker].send(WAKE)
        if present:
            self.count_moved(self.moved_bytes(block))

    def close(self) -> None:
        super().close()
        self.board.close()


class SharedMemReceiver(LocalReceiver):
    """Reads the board, and pins the block that it reads."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._row: Row | None = None
        self._applied_word = self._taken_word = 0
        self._pin = 0
        self._retries = 0

    def _map(self, fds: list[int]) -> None:
        blocks, memory, fence = fds
        self._blocks = BlockPool(self.layout, 0, blocks)
        self._board = Board(self.worker + 1, (memory, fence))
        self._row = self._board.rows[self.worker]

    @property
    def row(self) -> Row:
        assert self._row is not None, "the sender has not answered yet"
        return self._row

    def has_news(self) -> bool:
        return self._row is not None and self._row.latest not in (0, self._applied_word)

    def take(self) -> Snapshot | None:
        if self._row is None:
            self.listen()
        if not self.has_news():
            return None
        self._taken_word, self._retries = self.row.pin(self._pin)
        version, number = version_and_block(self._taken_word)
        block = self._blocks[number]
        self._check(block, version)
        return block

    def _check(self, block: Snapshot, version: int) -> None:
        if block.version != version:
            raise RuntimeError(
                f"version {version} was overwritten by version {block.version} while it was read"
            )

    def answer(self, answer: Answer) -> None:
        if self._row is not None:
            self._applied_word = self._taken_word
            self.row.unpin(self._pin)
        super().answer(answer._replace(retries=self._retries))

    def keep_block(self) -> None:
        self._pin = 1 - self._pin  # `answer` releases the block that was kept before

    @contextlib.contextmanager
    def sleeping(self) -> Iterator[None]:
        if self._row is None:
            yield
            return
        self._row.sleep(True)
        try:
            yield
        finally:
            self._row.sleep(False)
            self.listen()


@register("shared_mem", "shared", "thread")
class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Versions in shared memory: one pass to write, none to move.

    per_worker_weights: allow `send({0: w0, 2: w2})`, with different weights for each worker.
    zero_copy: let parameters point at the block instead of copying it. They are then read-only in
        the worker: writing to one ends its process. Buffers are always copied.
    """

    sender_channel = SharedMemSender
    receiver_channel = SharedMemReceiver

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        zero_copy: bool = False,
        **options: Any,
    ):
        super().__init__(strategy, sync=sync, **options)
        if zero_copy and self.wire != "float32":
            raise ValueError(
                f"zero_copy=True with wire={self.wire!r}: parameters cannot point at weights that "
                'have to be decoded; use wire="float32" or zero_copy=False'
            )
        self.per_worker_weights = per_worker_weights
        self.zero_copy = zero_copy

    def _make_sender(self, layout: Layout, num_workers: int) -> SenderChannel:
        return SharedMemSender(layout, num_workers, zero_copy=self.zero_copy)

    def _check_by_worker(self) -> None:
        if not self.per_worker_weights:
            raise ValueError(
                "send({worker: weights}) needs SharedMemWeightSyncScheme(per_worker_weights=True)"
            )
