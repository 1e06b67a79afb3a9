"""The clock of timeouts: suspension is left out, and starvation is not."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sync.local import waiting
from sync.local.waiting import AwakeClock, wait_for
from tests.sync.support import Handed, Worker


def late_wait(monkeypatch, *, late_s, queued_s):
    """A wait that ends `late_s` after its time, of which this thread was ready for `queued_s`."""
    now, queued = [1000.0], [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(waiting, "_queued_s", lambda: queued[0])
    clock = AwakeClock()
    before = clock()
    clock.begin()
    due = now[0] + 1.0
    now[0] = due + late_s
    queued[0] += queued_s
    clock.end(due)
    return clock() - before


def test_time_for_which_the_process_was_stopped_does_not_count(monkeypatch):
    assert late_wait(monkeypatch, late_s=30.0, queued_s=0.0) == pytest.approx(1.0)


def test_time_for_which_it_was_ready_and_got_no_processor_counts(monkeypatch):
    assert late_wait(monkeypatch, late_s=30.0, queued_s=30.0) == pytest.approx(31.0)


def test_of_a_late_wait_only_the_stopped_part_is_left_out(monkeypatch):
    assert late_wait(monkeypatch, late_s=30.0, queued_s=10.0) == pytest.approx(11.0)


def test_a_process_that_was_stopped_in_a_wait_does_not_count_that_time():
    def wait(handed, model):
        begun, awake = time.monotonic(), waiting.awake_s()
        while time.monotonic() - begun < 3.0:
            wait_for([], 0.5)
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


def test_starvation_is_read_where_the_kernel_says_it():
    assert waiting._queued_s() >= 0.0


def test_a_stop_that_several_threads_saw_is_left_out_once(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(waiting, "_queued_s", lambda: 0.0)
    clock = AwakeClock()
    before = clock()
    now[0] += 31.0
    for _ in range(4):
        clock.end(1001.0)
    assert clock() - before == pytest.approx(1.0)
