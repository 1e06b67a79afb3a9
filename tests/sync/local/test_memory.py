"""Memory without a name, and the pool of blocks in it."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import pickle
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing import reduction

import pytest
import torch

from collectors.workers.pipe import Pipe
from sync import Layout
from sync.local.memory import AnonymousMemory, BlockPool, SharedFd
from sync.local.waiting import Doorbell, wait_for
from tests.sync.support import Handed, Worker


def test_memory_is_shared_with_another_process_both_ways():
    memory = AnonymousMemory(3 * mmap.PAGESIZE)
    ours = memory.map(0, memory.nbytes, writable=True)

    def answer(handed, model):
        theirs = handed.memory.map(mmap.PAGESIZE, mmap.PAGESIZE, writable=True)
        seen = int(theirs[5])
        theirs[6] = 42
        return seen

    with Worker(Handed(memory=memory), None) as worker:
        ours[mmap.PAGESIZE + 5] = 17
        assert worker.do(answer) == 17
        assert ours[mmap.PAGESIZE + 6] == 42
    assert memory.nbytes == 3 * mmap.PAGESIZE
    assert int(ours.sum()) == 17 + 42  # all else is zero


def test_a_mapping_outlives_the_descriptor_it_was_made_from():
    memory = AnonymousMemory(10)
    view = memory.map(0, 10, writable=True)
    del memory
    gc.collect()
    view.fill_(3)
    assert int(view.sum()) == 30


def test_memory_is_taken_from_the_machine_only_where_it_was_written():
    memory = AnonymousMemory(64 << 20)
    view = memory.map(0, memory.nbytes, writable=True)
    view[: mmap.PAGESIZE].fill_(1)
    assert os.fstat(memory.fd).st_blocks * 512 <= 1 << 20


def test_no_process_can_cut_the_memory_off_under_another():
    memory = AnonymousMemory(mmap.PAGESIZE)
    for size in (0, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)


@pytest.mark.parametrize(
    ("limit", "kind", "why"),
    [
        (
            resource.RLIMIT_FSIZE,
            AnonymousMemory,
            "File too large: '1048576 bytes of shared memory'",
        ),
        (resource.RLIMIT_NOFILE, AnonymousMemory, "Too many open files"),
        (resource.RLIMIT_NOFILE, lambda size: Doorbell(), "Too many open files"),
    ],
)
def test_what_cannot_be_had_is_said_once_and_leaves_nothing(limit, kind, why, capfd):
    def ask(handed, model):  # in a process without other threads, which open descriptors of theirs
        gc.collect()
        before, limits = len(os.listdir("/proc/self/fd")), resource.getrlimit(limit)
        resource.setrlimit(limit, (0, limits[1]))
        try:
            kind(1 << 20)
            said = "nothing"
        except OSError as error:
            said = str(error)
        finally:
            resource.setrlimit(limit, limits)
        gc.collect()
        return said, before, len(os.listdir("/proc/self/fd"))

    with Worker(Handed(), None) as worker:
        said, before, after = worker.do(ask)
    assert why in said
    assert after == before
    assert capfd.readouterr().err == ""  # no "Exception ignored in" either


def test_writing_to_a_read_only_mapping_ends_the_process_and_harms_no_other():
    memory = AnonymousMemory(mmap.PAGESIZE)
    ours = memory.map(0, mmap.PAGESIZE, writable=True)
    ours.fill_(7)

    def spoil(handed, model):
        faulthandler.disable()  # which would tell of it on the terminal
        handed.memory.map(0, mmap.PAGESIZE, writable=False).fill_(9)

    with Worker(Handed(memory=memory), None) as worker:
        worker.tell(spoil)
        worker.process.join(20)
        assert worker.process.exitcode == -signal.SIGSEGV
    assert (ours == 7).all()


def test_a_descriptor_is_closed_once():
    reader, writer = os.pipe()
    os.close(writer)
    shared = SharedFd(reader)
    assert shared.fileno() == reader
    shared.close()
    again = os.open(os.devnull, os.O_RDONLY)  # has the number now
    shared.close()
    del shared
    os.fstat(again)
    os.close(again)


def test_what_is_pickled_has_a_descriptor_of_its_own():
    things = memory, bell = AnonymousMemory(mmap.PAGESIZE), Doorbell()
    memory.map(0, 8, writable=True).fill_(5)
    twin, echo = pickle.loads(reduction.ForkingPickler.dumps(things))
    assert twin.fd != memory.fd
    assert (twin.map(0, 8, writable=False) == 5).all()
    echo.ring()
    assert wait_for([bell.fd], 0) == [bell.fd]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torch_is_not_warned_of_read_only_memory(recwarn):
    memory = AnonymousMemory(mmap.PAGESIZE)
    view = memory.map(0, 16, writable=False)
    assert view.dtype == torch.uint8
    assert not recwarn.list


def socketpair_end():
    near, far = Pipe.pair()
    far.close()
    return near


class Stop(BaseException):
    pass


@pytest.mark.parametrize("make", [Doorbell, lambda: AnonymousMemory(8), socketpair_end])
def test_no_interrupt_is_lost_while_an_object_is_cleared_away(make):
    def stop(signum, frame):
        came.append(signum)
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for k in range(300):
            came: list[int] = []
            with suppress(Stop):
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + k * 1e-6)
                while not came:
                    make().close()
                pytest.fail("an interrupt was lost")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("closed", [False, True])
def test_a_closed_bell_rings_no_file_that_has_its_number(tmp_path, closed):
    class Owner:
        def __init__(self):
            self.bell, self.itself = Doorbell(), self
            if closed:
                self.bell.close()

        def __del__(self):  # in a cycle, the bell is closed already
            with open(tmp_path / "other", "w+b", buffering=0) as other:
                other.write(b"12345678")
                other.seek(0)
                self.bell.ring()
                self.bell.silence()
                self.bell.close()
                other.write(b"ab")

    Owner()
    gc.collect()
    assert (tmp_path / "other").read_bytes() == b"ab345678"


# -- blocks

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
        faulthandler.disable()  # which would tell of it on the terminal
        as_a_worker_sees(handed.pool)[1].views[0].fill_(0)

    with Worker(Handed(pool=pool), None) as worker:
        assert worker.do(look) == (5, 1000.0, 2)
        write(pool[1], 2.0, 6)
        assert worker.do(look) == (6, 2000.0, 2)
        worker.tell(spoil)
        worker.process.join(20)
        assert worker.process.exitcode == -signal.SIGSEGV
    assert (pool[1].views[0] == 2).all()
