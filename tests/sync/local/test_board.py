"""The notice board: what a worker pins is not written, and a sleeping worker is woken once."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from sync import Layout
from sync.channel_interface import APPLIED, Answer
from sync.local.waiting import Watch
from sync.model.block import NEVER
from sync.schemes.shared_mem import (
    _ROW_WORDS,
    FREE,
    Board,
    Row,
    SharedMemReceiver,
    SharedMemSender,
    version_and_block,
    word_of,
)
from tests.sync.local.simulated_memory import Position, Side, World, explore
from tests.sync.support import Handed, Worker

LAYOUT = Layout.of({"a": torch.zeros(3)})
BLOCKS, VERSIONS = 5, 3  # of the simulated memory


def test_a_word_holds_a_version_and_a_block():
    for version, number in ((0, 0), (7, 3), (2**40, 2**16 - 1)):
        assert version_and_block(word_of(version, number)) == (version, number)


# -- every order in which a sender and a worker may go on, word by word


class Words:
    """The words of a row."""

    def __init__(self, side: Side):
        self._side = side

    def __getitem__(self, word: int) -> int:
        return self._side.load(word)

    def __setitem__(self, word: int, value: int) -> None:
        self._side.store(word, value)


class Block:
    """A header word with the version, and one word of weights, which are the version, too."""

    def __init__(self, side: Side, number: int):
        self._side, self.number = side, number
        self._header = _ROW_WORDS + 2 * number

    @property
    def version(self) -> int:
        return self._side.load(self._header)

    def read(self, version: int) -> None:
        for word in (1, 0):
            self._side.expect(self._header + word, version)

    def write(self, version: int) -> None:
        for word, value in ((0, NEVER), (1, version), (0, version)):
            self._side.store(self._header + word, value)


def publish(side: Side, version: int) -> int | None:
    """Publish one version as a sender does, whose board and blocks are simulated."""
    connection = SimpleNamespace(send=lambda kind: side.send_message())
    sender = SimpleNamespace(
        board=SimpleNamespace(rows=[Row(Words(side), side.fence)], fence=side.fence),
        blocks=SimpleNamespace(free=lambda held: Block(side, min(set(range(BLOCKS)) - held))),
        _workers={0: connection},
        count_moved=lambda nbytes: None,
        moved_bytes=lambda block: 0,
    )
    block = SharedMemSender.free_block(sender, [])
    block.write(version)
    published = SimpleNamespace(version=version, number=block.number)
    SharedMemSender.publish(sender, published, [0])
    if version == VERSIONS:
        return None
    return version + 1


class Held(NamedTuple):
    """What a worker has between two calls of `receive`."""

    word: int = 0
    pin: int = 0
    pointed_at: tuple[int, int] | None = None  # version and block, with zero_copy


def receive(side: Side, held: Held, zero_copy: bool) -> Held:
    """Receive one version as a worker does, whose row and blocks are simulated."""
    channel = SharedMemReceiver(None, None, 0)
    channel._row = Row(Words(side), side.fence)
    channel._blocks = [Block(side, number) for number in range(BLOCKS)]
    channel._connection = SimpleNamespace(send=lambda *message: None)
    channel._applied_word, channel._pin = held.word, held.pin
    channel.listen = side.read_messages
    with channel.sleeping():
        if not channel.has_news():
            side.wait_for_message()
    block = channel.take()
    if block is None:
        return held
    version = version_and_block(channel._taken_word)[0]
    block.read(version)
    if held.pointed_at is not None:
        before, number = held.pointed_at
        Block(side, number).read(before)
    if zero_copy:
        channel.keep_block()
    channel.answer(Answer(0, APPLIED, version))
    assert channel._applied_word > held.word
    pointed_at = (version, block.number) if zero_copy else None
    return Held(channel._applied_word, channel._pin, pointed_at)


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copying", "pointing"])
def test_a_worker_reads_whole_versions_in_every_order_of_steps(zero_copy):
    words = [0] * _ROW_WORDS + [NEVER, 0] * BLOCKS
    words[1] = words[2] = FREE
    first_pin = int(zero_copy)  # so that both pins matter: with zero_copy, they are used in turn
    world = World(tuple(words), (Position(1), Position(Held(pin=first_pin))))
    ends = list(explore(world, (publish, lambda side, held: receive(side, held, zero_copy))))
    assert ends
    for end in ends:
        sender, worker = end.positions
        assert (sender.state, worker.is_waiting) == (None, True)
        assert worker.state.word == end.memory[0], "the worker sleeps although there is news"
        assert version_and_block(worker.state.word)[0] == VERSIONS


# -- the fence


def test_a_fence_is_shared_with_another_process():
    board = Board(1)

    def use(handed, model):
        theirs = Board(1, tuple(fd.detach() for fd in handed.fds))
        for _ in range(1000):
            theirs.fence()
        return True

    with Worker(Handed(fds=[DupFd(fd) for fd in board.fds()]), None) as worker:
        worker.tell(use)
        for _ in range(1000):
            board.fence()
        assert worker.hear()


def test_a_process_that_is_stopped_or_forked_in_a_fence_keeps_nobody_out():
    fence, stop = Board(1).fence, threading.Event()

    def use():
        while not stop.is_set():
            fence()

    thread = threading.Thread(target=use)
    thread.start()
    children = []
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                while True:
                    fence()
            children.append(child)
            os.kill(child, signal.SIGSTOP)
            for _ in range(100):
                fence()
    finally:
        stop.set()
        thread.join(20)
        for child in children:
            os.kill(child, signal.SIGKILL)
            assert Watch(child).wait(20)
            os.waitpid(child, 0)
