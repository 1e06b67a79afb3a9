"""Doorbells, watches, and the clock of timeouts, which leaves out time of suspension."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sync.local.waiting import Doorbell, Watch, awake_s, wait_for
from tests.sync.support import Handed, Worker


@pytest.fixture
def now(monkeypatch):
    """The time of `time.monotonic`, which tests move."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_time_for_which_the_process_was_stopped_counts_as_one_slice(now):
    before = awake_s()
    now[0] += 31.0
    assert awake_s() - before == pytest.approx(1.0)
    for _ in range(4):  # other threads saw the same stop
        assert awake_s() - before == pytest.approx(1.0)


def test_every_wait_counts_that_is_at_most_a_second_late(now):
    before = awake_s()
    for _ in range(10):
        now[0] += 2.0
        awake_s()
    assert awake_s() - before == pytest.approx(20.0)


# -- doorbells


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


# -- watches


def test_a_watch_sees_a_process_end_also_if_nobody_collected_it():
    with Worker(Handed(), None) as worker:
        watch = Watch(worker.process.pid)
        assert not watch.look()
        worker.tell(lambda s, m: os._exit(3))
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        assert watch.look()
        assert watch.fds() == []
    assert worker.process.exitcode == 3  # the watch took nothing from its owner
    assert Watch(worker.process.pid).look()  # it was gone before it was watched


def test_a_watch_that_another_thread_closes_tells_nothing_new():
    with Worker(Handed(), None) as worker:
        watch = Watch(worker.process.pid)
        watch.close()
        assert not watch.look()
        assert wait_for(watch.fds(), 0.01) == []


def test_a_process_in_another_pid_namespace_never_counts_as_gone():
    watch = Watch(0)
    assert not watch.look()
    assert watch.fds() == []
    watch.close()


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
