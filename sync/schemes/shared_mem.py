"""Weights through shared memory: one block per version, which every worker reads in place.

    trainer: send()                       worker: receive()
    ---------------                       -----------------
    write a free block  (one pass)
    announce it on the board              has_news(): is `latest` another word?
    wake the workers that sleep   ---->   pin the block; copy it, or point at it
    wait for all  <------------- DONE     unpin it

`local/notice_board.py` has the protocol word by word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sync.channel import Answer, SenderChannel
from sync.local.channel import LocalReceiver, LocalSender
from sync.local.memory import AnonymousMemory, BlockPool
from sync.local.notice_board import Board, Fence, Row, version_and_block
from sync.local.rendezvous import WAKE
from sync.model.block import Layout, Snapshot
from sync.model.strategy import WeightStrategy
from sync.registry import register
from sync.scheme import WeightSyncScheme

SEGFAULT_HINT = "; did it write to its parameters? With zero_copy=True they are read-only there"


class SharedMemSender(LocalSender):
    """Announces versions on a board that workers read on their own."""

    mechanism = "shared memory"

    def __init__(self, layout: Layout, num_workers: int, *, zero_copy: bool = False):
        # Each worker can hold three blocks: its latest, the one in use, and the one that it
        # changes to. One more is being written.
        super().__init__(layout, num_workers, blocks_per_worker=4)
        self.board = Board(num_workers)
        self.segfault_hint = SEGFAULT_HINT if zero_copy else ""
        for row in self.board.rows:
            row.clear()

    def _shared_fds(self) -> list[int]:
        return [self.blocks.fd, self.board.memory.fd, self.board.fence.fd]

    def _reset(self, worker: int) -> None:
        self.board.rows[worker].clear()

    def free_block(self, keep: Collection[Snapshot]) -> Snapshot:
        held = {block.number for block in keep}
        for row in self.board.rows:
            held |= row.held()
        return self.blocks.free(held)

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        present = [worker for worker in workers if worker in self._processes]
        rows = self.board.rows
        self.board.fence()  # the block is visible before it is announced
        for worker in present:
            rows[worker].announce(block)
        self.board.fence()  # the announcement is visible before the words `asleep` are read
        for worker in present:
            if rows[worker].clear_asleep():
                self._processes[worker].connection.send(WAKE)
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
        blocks, board, fence = fds
        self._blocks = BlockPool(self.layout, 0, blocks)
        memory = AnonymousMemory((self.worker + 1) * 64, board)
        self._board = Board(self.worker + 1, memory, Fence(fence))
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
