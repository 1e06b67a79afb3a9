"""Whether another process still runs, and how it ended."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from sync.local.process import Watch, must_look
from sync.local.waiting import wait_for
from tests.sync.support import Handed, Worker


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


def test_a_watch_that_another_thread_closes_tells_nothing_new(system):
    with Worker(Handed(), None) as worker:
        watch = Watch(worker.process.pid)
        watch.close()
        assert not watch.look()
        assert wait_for(watch.fds(), 0.01) == []


@pytest.mark.parametrize("refusal", [errno.EMFILE, errno.EPERM, errno.ENOSYS])
def test_a_process_is_looked_up_where_the_kernel_gives_no_descriptor_for_it(refusal, monkeypatch):
    def refuse(pid):
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    monkeypatch.setattr("sync.local.process.PIDFDS", True)
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

    monkeypatch.setattr("sync.local.process.PIDFDS", False)
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
    monkeypatch.setattr("sync.local.process.PIDFDS", False)
    with Worker(Handed(), None) as worker:
        watch = Watch(worker.process.pid)
        assert not watch.look()
        worker.tell(lambda s, m: os._exit(3))
        worker.process.join(20)
        assert watch.look()
        assert watch.ending == ""
