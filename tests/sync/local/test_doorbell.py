"""Doorbells and fences."""

from __future__ import annotations

import os
import signal
import threading

from sync.local.doorbell import Doorbell, Fence
from sync.local.process import Watch
from sync.local.waiting import wait_for
from tests.sync.support import Handed, Worker


def test_a_bell_rings_until_it_is_silenced_however_often_it_was_rung():
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


def test_a_closed_bell_is_rung_in_silence():
    bell = Doorbell()
    bell.close()
    bell.ring()  # in garbage, which is finalised in any order, whoever rings may come last


def test_a_bell_wakes_another_process():
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


def test_waiting_is_bounded_and_says_which_descriptors_have_news():
    silent, ringing = Doorbell(), Doorbell()
    ringing.ring()
    assert wait_for([], 0) == []
    assert wait_for([silent.fd], 0.01) == []
    assert wait_for([silent.fd, ringing.fd], 20) == [ringing.fd]


def test_a_fence_is_shared_with_another_process():
    fence = Fence()

    def use(handed, model):
        twin = Fence(os.dup(handed.fence.fd))
        for _ in range(1000):
            twin()
        return True

    with Worker(Handed(fence=fence), None) as worker:
        worker.tell(use)
        for _ in range(1000):
            fence()
        assert worker.hear()


def test_a_process_that_is_stopped_or_forked_in_a_fence_keeps_nobody_out():
    fence, stop = Fence(), threading.Event()

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
