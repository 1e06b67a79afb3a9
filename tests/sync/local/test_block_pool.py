"""The pool of blocks: the lowest free one is written, and only readers' blocks are kept."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from sync import Layout
from sync.local.block_pool import BlockPool
from tests.sync.support import Handed, Worker

LAYOUT = Layout.of({"a": torch.zeros(1000)})


def write(block, value, version):
    block.begin()
    block.views[0].fill_(value)
    block.stamp(version, b"")


def as_a_worker_sees(pool):
    return BlockPool(LAYOUT, pool.capacity, os.dup(pool.fd))


@pytest.mark.parametrize(
    ("held", "free"), [(set(), 0), ({0}, 1), ({1, 2}, 0), ({0, 1, 3}, 2), ({-1, 0}, 1)]
)
def test_the_lowest_block_that_nobody_holds_is_free(held, free):
    assert BlockPool(LAYOUT, 4).free(held).number == free


def test_holding_all_blocks_is_a_bug_that_says_so():
    with pytest.raises(AssertionError, match="all 2 blocks are in use"):
        BlockPool(LAYOUT, 2).free({0, 1})


def test_blocks_do_not_overlap():
    pool = BlockPool(LAYOUT, 3)
    for number in range(3):
        write(pool[number], number + 1.0, number)
    for number in range(3):
        assert pool[number].version == number
        assert (pool[number].views[0] == number + 1).all()


def test_memory_is_counted_by_the_blocks_that_were_used():
    pool = BlockPool(LAYOUT, 1000)
    assert pool.memory_bytes == 0
    for number in (0, 1, 0):
        assert pool[number] is pool[number]
    assert LAYOUT.nbytes * 2 <= pool.memory_bytes < LAYOUT.nbytes * 4


def test_a_reader_sees_what_is_written_and_cannot_write():
    pool = BlockPool(LAYOUT, 2)
    write(pool[1], 1.0, 5)

    def look(handed, model):
        theirs = as_a_worker_sees(handed.pool)
        return theirs[1].version, theirs[1].views[0].sum().item(), theirs.capacity

    def spoil(handed, model):
        as_a_worker_sees(handed.pool)[1].views[0].fill_(0)

    with Worker(Handed(pool=pool), None) as worker:
        assert worker.do(look) == (5, 1000.0, 2)
        write(pool[1], 2.0, 6)
        assert worker.do(look) == (6, 2000.0, 2)
        worker.tell(spoil)
        worker.process.join(20)
        assert worker.process.exitcode == -signal.SIGSEGV
    assert (pool[1].views[0] == 2).all()
