"""Memory and doorbells without names, with what this machine has and with what others have."""

from __future__ import annotations

import errno
import faulthandler
import fcntl
import gc
import mmap
import os
import pickle
import resource
import signal
import sys
import threading
from multiprocessing import reduction

import pytest
import torch

from sync.board import Board
from sync.memory import (
    X86,
    AnonymousMemory,
    Doorbell,
    Order,
    SharedFd,
    Watch,
    must_look,
    wait_for,
)
from tests.sync.support import Handed, Worker


def test_memory_is_shared_with_another_process_both_ways(system):
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


def test_memory_is_taken_from_the_machine_only_where_it_was_written(system):
    memory = AnonymousMemory(64 << 20)
    view = memory.map(0, memory.nbytes, writable=True)
    view[: mmap.PAGESIZE].fill_(1)
    assert os.fstat(memory.fd).st_blocks * 512 <= 1 << 20


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only memfd can be sealed")
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
def test_what_cannot_be_had_is_said_once_and_leaves_nothing(system, limit, kind, why, capfd):
    before, limits = len(os.listdir("/proc/self/fd")), resource.getrlimit(limit)
    gc.collect()
    resource.setrlimit(limit, (0, limits[1]))
    try:
        with pytest.raises(OSError, match=why):
            kind(1 << 20)
    finally:
        resource.setrlimit(limit, limits)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert capfd.readouterr().err == ""  # no "Exception ignored in" either


def test_writing_to_a_read_only_mapping_ends_the_process_and_harms_no_other(system):
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


def test_a_bell_rings_until_it_is_silenced_however_often_it_was_rung(system):
    bell = Doorbell()
    assert wait_for([bell.fd], 0) == []
    for times in (1, 2, 100_000):
        for _ in range(times):
            bell.ring()
        for _ in range(2):
            assert wait_for([bell.fd], 0) == [bell.fd]
        bell.silence()
        assert wait_for([bell.fd], 0) == []
    bell.silence()  # a silent bell may be silenced


def test_a_closed_bell_is_rung_in_silence(system):
    bell = Doorbell()
    bell.close()
    bell.ring()  # in garbage, which is finalised in any order, whoever rings may come last


def test_a_bell_wakes_another_process(system):
    mine, theirs = Doorbell(), Doorbell()

    def answer(handed, model):
        woken = wait_for([handed.theirs.fd], 20)
        handed.theirs.silence()
        handed.mine.ring()
        return woken == [handed.theirs.fd]

    with Worker(Handed(mine=mine, theirs=theirs), None) as worker:
        worker.tell(answer)
        theirs.ring()
        assert wait_until(mine)
        assert worker.hear()


def wait_until(bell):
    return any(wait_for([bell.fd], 1.0) for _ in range(20))


def test_waiting_is_bounded_and_says_which_descriptors_have_news(system):
    silent, ringing = Doorbell(), Doorbell()
    ringing.ring()
    assert wait_for([], 0) == []
    assert wait_for([silent.fd], 0.01) == []
    assert wait_for([silent.fd, ringing.fd], 20) == [ringing.fd]


def test_a_watch_sees_a_process_end_also_if_nobody_collected_it(system):
    with Worker(Handed(), None) as worker:
        watch = Watch(worker.process.pid)
        assert not watch.look()
        worker.tell(lambda s, m: os._exit(3))
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        assert watch.look()
        assert watch.fds() == []
    assert worker.process.exitcode == 3  # the watch took nothing from its owner
    assert Watch(worker.process.pid).look()  # it was gone before it was watched


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


def test_what_is_pickled_has_a_descriptor_of_its_own(system):
    things = memory, bell = AnonymousMemory(mmap.PAGESIZE), Doorbell()
    memory.map(0, 8, writable=True).fill_(5)
    twin, echo = pickle.loads(reduction.ForkingPickler.dumps(things))
    assert twin.fd != memory.fd
    assert (twin.map(0, 8, writable=False) == 5).all()
    echo.ring()
    assert wait_for([bell.fd], 0) == [bell.fd]


def test_order_says_what_it_is_made_of_and_takes_it_along():
    memory = AnonymousMemory(8)
    assert Order(memory).kind == ("fence" if X86 else "lock")
    for locked, kind in ((True, "lock"), (False, "fence")):
        order = Order(memory, locked=locked)
        order()
        twin = pickle.loads(reduction.ForkingPickler.dumps(order))
        twin()
        assert (order.kind, twin.kind) == (kind, kind)


@pytest.mark.parametrize("locked", [False, True], ids=["fence", "lock"])
def test_a_child_forked_in_the_middle_of_another_threads_use_is_not_stuck(locked):
    order, stop = Order(AnonymousMemory(8), locked=locked), threading.Event()

    def use():
        while not stop.is_set():
            order()

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(20):
            if (child := os.fork()) == 0:
                try:
                    order()
                finally:
                    os._exit(0)
            watch = Watch(child)
            wait_for(watch.fds(), 5)
            ended = watch.look()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert ended
    finally:
        stop.set()
        thread.join(20)


def test_a_lock_whose_holder_died_is_free_again():
    board = Board(1, locked=True)

    def die_holding(handed, model):
        fcntl.lockf(handed.board.memory.fd, fcntl.LOCK_EX)
        os._exit(0)

    with Worker(Handed(board=board), None) as worker:
        worker.tell(die_holding)
        worker.process.join(20)
        board.order()


def test_a_lock_whose_holder_hangs_is_an_error_in_the_end(monkeypatch):
    board = Board(1, locked=True)

    def hold(handed, model):
        fcntl.lockf(handed.board.memory.fd, fcntl.LOCK_EX)

    with Worker(Handed(board=board), None) as worker:
        worker.do(hold)
        clock = iter([0.0, *[5.0] * 3, 11.0])
        monkeypatch.setattr("sync.memory.time.monotonic", lambda: next(clock))
        with pytest.raises(TimeoutError, match="a stopped process holds the lock"):
            board.order()
        monkeypatch.undo()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torch_is_not_warned_of_read_only_memory(recwarn):
    memory = AnonymousMemory(mmap.PAGESIZE)
    view = memory.map(0, 16, writable=False)
    assert view.dtype == torch.uint8
    assert not recwarn.list


@pytest.mark.parametrize("refusal", [errno.EMFILE, errno.EPERM, errno.ENOSYS])
def test_a_process_is_looked_up_where_the_kernel_gives_no_descriptor_for_it(refusal, monkeypatch):
    def refuse(pid):
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    monkeypatch.setattr("sync.memory.PIDFDS", True)
    with Worker(Handed(), None) as worker:
        watch = Watch(worker.process.pid)
        assert not watch.look()
        assert (watch.fds(), must_look()) == ([], True)
        worker.tell(lambda s, m: os._exit(0))
        while not watch.look():
            assert wait_for([], 60.0) == []  # which is short, since somebody must look
    assert not must_look()


def test_another_users_process_is_there(monkeypatch):
    def forbidden(pid, signum):
        raise PermissionError

    monkeypatch.setattr("sync.memory.PIDFDS", False)
    watch = Watch(os.getpid())
    monkeypatch.setattr(os, "kill", forbidden)
    assert not watch.look()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(0), "exit code 0"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 5), "killed by signal"),
    ],
    ids=["exit", "exit_3", "kill", "real_time"],
)
def test_how_a_child_ended_is_known_until_somebody_collects_it(end, words):
    with Worker(Handed(), None) as worker:
        watch = Watch(worker.process.pid)
        worker.tell(lambda s, m: end())
        while not watch.look():
            wait_for(watch.fds(), 20)
        assert watch.ending.startswith(words)
        worker.process.join(20)
        assert Watch(worker.process.pid).look()
        assert watch.ending.startswith(words)


def test_how_a_process_ended_that_is_no_child_is_not_known():
    pid = os.fork()
    if not pid:
        os._exit(3)
    os.waitpid(pid, 0)
    gone = Watch(pid)
    assert (gone.look(), gone.ending) == (True, "")


def test_a_system_without_waitid_looks_up_by_signal(monkeypatch):
    monkeypatch.delattr(os, "waitid")
    monkeypatch.setattr("sync.memory.PIDFDS", False)
    with Worker(Handed(), None) as worker:
        watch = Watch(worker.process.pid)
        assert not watch.look()
        worker.tell(lambda s, m: os._exit(3))
        worker.process.join(20)
        assert watch.look()
        assert watch.ending == ""


@pytest.mark.parametrize("kind", [SharedFd, AnonymousMemory, Doorbell])
def test_half_an_object_is_cleared_away_in_silence(kind):
    half = kind.__new__(kind)  # an interrupt came before it had a descriptor
    half.__del__()
    assert half.fd == -1
