"""Whether another process still runs, and how it ended."""

from __future__ import annotations

import os
import signal

import pytest

from sync.local.process import Watch
from sync.local.waiting import wait_for
from tests.sync.support import Handed, Worker


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
