"""The clock of timeouts: time during which the process is suspended is left out."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sync.local import waiting
from sync.local.waiting import AwakeClock, wait_for
from tests.sync.support import Handed, Worker


@pytest.fixture
def now(monkeypatch):
    """The time of `time.monotonic`, which tests move."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_time_for_which_the_process_was_stopped_counts_as_one_slice(now):
    clock = AwakeClock()
    before = clock()
    now[0] += 31.0
    assert clock() - before == pytest.approx(1.0)
    for _ in range(4):  # other threads saw the same stop
        assert clock() - before == pytest.approx(1.0)


def test_every_wait_counts_that_is_at_most_a_second_late(now):
    clock = AwakeClock()
    before = clock()
    for _ in range(10):
        now[0] += 2.0
        clock()
    assert clock() - before == pytest.approx(20.0)


def test_a_process_that_was_stopped_in_a_wait_does_not_count_that_time():
    def wait(handed, model):
        begun, awake = time.monotonic(), waiting.awake_s()
        while time.monotonic() - begun < 3.0:
            wait_for([], 0.5)
            waiting.awake_s()
        return time.monotonic() - begun, waiting.awake_s() - awake

    with Worker(Handed(), None) as worker:
        worker.tell(wait)
        time.sleep(0.3)
        os.kill(worker.process.pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(worker.process.pid, signal.SIGCONT)
        passed, awake = worker.hear()
        assert passed > 4.0
        assert awake < passed - 2.0
