"""The pool of blocks: the lowest free one is written, and only readers' slots are kept."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from sync import Layout
from sync.local.slots import Slots
from tests.sync.support import Handed, Worker

LAYOUT = Layout.of({"a": torch.zeros(1000)})


def write(block, value, version):
    block.begin()
    block.views[0].fill_(value)
    block.stamp(version, b"")


def as_a_worker_sees(slots):
    return Slots(LAYOUT, slots.capacity, os.dup(slots.fd))


@pytest.mark.parametrize(
    ("held", "free"), [(set(), 0), ({0}, 1), ({1, 2}, 0), ({0, 1, 3}, 2), ({-1, 0}, 1)]
)
def test_the_lowest_slot_that_nobody_holds_is_free(held, free):
    assert Slots(LAYOUT, 4).free(held).number == free


def test_holding_all_slots_is_a_bug_that_says_so():
    with pytest.raises(AssertionError, match="all 2 blocks are in use"):
        Slots(LAYOUT, 2).free({0, 1})


def test_slots_do_not_overlap():
    slots = Slots(LAYOUT, 3)
    for slot in range(3):
        write(slots[slot], slot + 1.0, slot)
    for slot in range(3):
        assert slots[slot].version == slot
        assert (slots[slot].views[0] == slot + 1).all()


def test_memory_is_counted_by_the_slots_that_were_used():
    slots = Slots(LAYOUT, 1000)
    assert slots.memory_bytes == 0
    for slot in (0, 1, 0):
        assert slots[slot] is slots[slot]
    assert LAYOUT.nbytes * 2 <= slots.memory_bytes < LAYOUT.nbytes * 4


def test_a_reader_sees_what_is_written_and_cannot_write():
    slots = Slots(LAYOUT, 2)
    write(slots[1], 1.0, 5)

    def look(handed, model):
        theirs = as_a_worker_sees(handed.slots)
        return theirs[1].version, theirs[1].views[0].sum().item(), theirs.capacity

    def spoil(handed, model):
        as_a_worker_sees(handed.slots)[1].views[0].fill_(0)

    with Worker(Handed(slots=slots), None) as worker:
        assert worker.do(look) == (5, 1000.0, 2)
        write(slots[1], 2.0, 6)
        assert worker.do(look) == (6, 2000.0, 2)
        worker.tell(spoil)
        worker.process.join(20)
        assert worker.process.exitcode == -signal.SIGSEGV
    assert (slots[1].views[0] == 2).all()
