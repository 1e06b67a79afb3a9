"""The pool of blocks: the lowest free one is written, and only readers' slots are kept."""

from __future__ import annotations

import signal

import pytest
import torch

from sync import Layout
from sync.slots import Slots
from tests.sync.support import Handed, Worker

LAYOUT = Layout.of({"a": torch.zeros(1000)})


@pytest.mark.parametrize(
    ("held", "free"), [(set(), 0), ({0}, 1), ({1, 2}, 0), ({0, 1, 3}, 2), ({-1, 0}, 1)]
)
def test_the_lowest_slot_that_nobody_holds_is_free(held, free):
    assert Slots(LAYOUT, 4).free(held) == free


def test_holding_all_slots_is_a_bug_that_says_so():
    with pytest.raises(AssertionError, match="all 2 slots are held"):
        Slots(LAYOUT, 2).free({0, 1})


def test_slots_do_not_overlap():
    slots = Slots(LAYOUT, 3)
    for slot in range(3):
        slots[slot].write([torch.full((1000,), slot + 1.0)], b"", slot, check_finite=True)
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
    slots[1].write([torch.ones(1000)], b"", 5, check_finite=True)

    def look(handed, model):
        theirs = handed.slots.read_only()
        return theirs[1].version, theirs[1].views[0].sum().item(), theirs.capacity

    def spoil(handed, model):
        handed.slots.read_only()[1].views[0].fill_(0)

    with Worker(Handed(slots=slots), None) as worker:
        assert worker.do(look) == (5, 1000.0, 2)
        slots[1].write([torch.full((1000,), 2.0)], b"", 6, check_finite=True)
        assert worker.do(look) == (6, 2000.0, 2)
        worker.tell(spoil)
        worker.process.join(20)
        assert worker.process.exitcode == -signal.SIGSEGV
    assert (slots[1].views[0] == 2).all()
