"""Weights by message: each worker is sent a message for every version, and copies it.

    trainer: send()                              worker: receive()
    ---------------                              -----------------
    write a free block  (one pass)
    to worker 0: "version v is in block b"  -->  copy b into the model
    to worker 1: "version v is in block b"  -->
    wait for all                            <--  DONE v

As in a `torch.multiprocessing` queue, a message names a block of shared memory and does not contain
its bytes. Only one message at a time is in flight to a worker. A version that is published
meanwhile waits in the sender, where a newer one replaces it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sync.channel_interface import LATER, Answer
from sync.local.memory import BlockPool
from sync.local.unix_connection import VERSION, Message
from sync.local.worker_connections import LocalReceiver, LocalSender
from sync.model.block import Layout, Snapshot
from sync.scheme import WeightSyncScheme
from sync.schemes import register


class MultiProcessSender(LocalSender):
    """Sends each worker a message, and the next one when the worker has answered."""

    mechanism = "messages"

    def __init__(self, layout: Layout, num_workers: int):
        # Each worker can have one block in flight and one waiting. One more is being written.
        super().__init__(layout, num_workers, blocks_per_worker=3)
        self._on_the_way: dict[int, Snapshot] = {}
        self._waiting: dict[int, Snapshot] = {}

    def _shared_fds(self) -> list[int]:
        return [self.blocks.fd]

    def _reset(self, worker: int) -> None:
        self._on_the_way.pop(worker, None)
        self._waiting.pop(worker, None)

    def free_block(self, keep: Collection[Snapshot]) -> Snapshot:
        numbers = {block.number for block in keep}
        numbers |= {block.number for block in self._on_the_way.values()}
        numbers |= {block.number for block in self._waiting.values()}
        return self.blocks.free(numbers)

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        for worker in workers:
            if worker in self._workers:
                self._waiting[worker] = block
                self._send_next(worker)

    def _send_next(self, worker: int) -> None:
        if worker in self._on_the_way or worker not in self._waiting:
            return
        block = self._on_the_way[worker] = self._waiting.pop(worker)
        self._workers[worker].send(VERSION, block.version, block.number)
        self.count_moved(block.nbytes)

    def _answered(self, answer: Answer) -> None:
        self._on_the_way.pop(answer.worker, None)
        self._send_next(answer.worker)

    def due_ns(self) -> int | None:
        due_ns = super().due_ns()
        if due_ns is None and not self._workers.keys().isdisjoint(self._waiting):
            return LATER  # when the worker has answered
        return due_ns


class MultiProcessReceiver(LocalReceiver):
    """Takes the block that the last message names."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._blocks: BlockPool | None = None
        self._named: tuple[int, int] | None = None  # version and block

    def _map(self, fds: list[int]) -> None:
        self._blocks = BlockPool(self.layout, 0, fds[0])

    def _on_message(self, message: Message) -> None:
        if message.kind == VERSION:
            self._named = message.numbers[0], message.numbers[1]

    def has_news(self) -> bool:
        if self._named is None:
            self.listen()
        return self._named is not None

    def take(self) -> Snapshot | None:
        if not self.has_news():
            return None
        assert self._named is not None
        assert self._blocks is not None
        version, number = self._named
        block = self._blocks[number]
        if block.version != version:
            raise RuntimeError(
                f"version {version} was overwritten by version {block.version} on its way"
            )
        return block

    def answer(self, answer: Answer) -> None:
        self._named = None
        super().answer(answer)


@register("multiprocess", "process", "multiprocessing")
class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Each worker gets a message for every version, and copies it into its own parameters.

    Initial weights that differ by worker (`params_map`, `device_map_fn`) are created one after the
    other, when their worker connects.
    """

    sender_channel = MultiProcessSender
    receiver_channel = MultiProcessReceiver
