"""The notice board: what a worker pins is not written, and a sleeping worker is woken once."""

from __future__ import annotations

import os

import torch

from sync import Layout
from sync.local.board import FREE, Board, Word
from sync.local.doorbell import Fence
from sync.local.memory import AnonymousMemory
from sync.local.slots import Slots
from tests.sync.support import Handed, Worker

LAYOUT = Layout.of({"a": torch.zeros(3)})


def board_of(workers=1):
    board = Board(workers)
    for row in board.rows:
        row.clear()
    return board


def block(number, version):
    found = Slots(LAYOUT, number + 1)[number]
    found.stamp(version, b"")
    return found


def as_a_worker_sees(board, workers):
    memory = AnonymousMemory(board.memory.nbytes, os.dup(board.memory.fd))
    return Board(workers, memory, Fence(os.dup(board.fence.fd)))


def test_a_word_holds_a_version_and_a_block():
    for version, number in ((0, 0), (7, 3), (2**40, 2**16 - 1)):
        assert Word.unpack(Word(version, number).packed()) == (version, number)


def test_nothing_is_held_until_something_is_announced():
    (row,) = board_of().rows
    assert row.held() == {FREE}
    assert row.latest == 0


def test_what_is_announced_or_pinned_is_held():
    board = board_of()
    (ours,), (theirs,) = board.rows, as_a_worker_sees(board, 1).rows
    ours.announce(block(2, 5))
    assert ours.held() == {FREE, 2}
    word, retries = theirs.pin(0)
    assert (Word.unpack(word), retries) == (Word(5, 2), 0)
    ours.announce(block(3, 6))
    assert ours.held() == {FREE, 2, 3}
    theirs.unpin(0)
    assert ours.held() == {FREE, 3}


def test_each_worker_has_a_row_of_its_own():
    board = board_of(3)
    theirs = as_a_worker_sees(board, 2)
    board.rows[1].announce(block(4, 9))
    assert [Word.unpack(row.latest).version for row in theirs.rows] == [-1, 9]
    theirs.rows[1].pin(1)
    assert [row.held() for row in board.rows] == [{FREE}, {FREE, 4}, {FREE}]


def test_a_sleeping_worker_is_woken_once():
    board = board_of()
    (ours,), (theirs,) = board.rows, as_a_worker_sees(board, 1).rows
    assert not ours.clear_asleep()
    theirs.sleep(True)
    assert [ours.clear_asleep() for _ in range(3)] == [True, False, False]
    theirs.sleep(True)
    theirs.sleep(False)
    assert not ours.clear_asleep()


def test_a_row_that_is_cleared_remembers_nothing_of_its_worker():
    board = board_of()
    (ours,), (theirs,) = board.rows, as_a_worker_sees(board, 1).rows
    ours.announce(block(2, 5))
    theirs.pin(0)
    theirs.sleep(True)
    ours.clear()
    assert (ours.held(), ours.latest, ours.clear_asleep()) == ({FREE}, 0, False)


def test_a_pin_is_of_the_newest_block_however_fast_others_are_announced():
    """Half a million announcements while a worker pins: it never holds anything but a newest."""
    board, slots = board_of(), Slots(LAYOUT, 3)
    for number in range(3):
        slots[number].stamp(number, b"")

    def pin_on(handed, model):
        (row,) = as_a_worker_sees(handed.board, 1).rows
        for _ in range(20_000):
            word, _ = row.pin(0)
            assert Word.unpack(word).block == Word.unpack(word).version % 3
            row.unpin(0)
        return True

    (row,) = board.rows
    row.announce(slots[0])
    with Worker(Handed(board=board), None) as worker:
        worker.tell(pin_on)
        version = 0
        while not worker._pipe.poll(0):
            version += 1
            held = row.held()
            newest = slots[version % 3]
            if newest.number not in held:
                newest.stamp(version, b"")
                row.announce(newest)
            else:
                version -= 1
        assert worker.hear()
        assert version > 100
