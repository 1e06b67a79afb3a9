"""What the answers of a remote worker's process may come to: late, out of order, or not at all."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from collectors.remote import host
from collectors.remote.remote_collector import RemoteCollector
from collectors.remote.remote_handle import Launcher
from sync import RPCWeightSyncScheme, WorkerRaised
from tests.collectors.remote.support import host_pids
from tests.collectors.remote.test_failures import gather, troubled
from tests.collectors.troubled import Plain, Troubled, wait_until
from tests.sync.remote.support import Threads

TIMEOUT_S = 10.0


def test_a_pause_may_be_longer_than_what_counts_as_hanging():
    options = {"frames_per_batch": 2000, "timeout": TIMEOUT_S}
    with troubled("distributed", sync=False, **options) as collector:
        gather(collector, 2)
        pid = host_pids(collector)[1]
        with collector.pause():
            assert any(handle.owed for handle in collector.pool.handles)
            over = time.monotonic() + 1.1 * TIMEOUT_S
            wait_until(lambda: time.monotonic() > over)
            os.kill(pid, signal.SIGSTOP)  # it hears late that the pause is over
            threading.Timer(TIMEOUT_S / 3, os.kill, (pid, signal.SIGCONT)).start()
        gather(collector, 4)


class Scripted(Threads):
    """Workers are threads of this process. The next call of `delayed` runs, or its answer comes,
    when it is released; the next call of `failing` fails."""

    delayed = failing = None
    before_it_runs = False

    def __init__(self):
        super().__init__()
        self.is_held = threading.Event()
        self.is_released = threading.Event()

    def call(self, peer, function, *args):
        late = Future()
        if function is self.failing:
            self.failing = None
            late.set_exception(RuntimeError("cannot be called"))
            return late
        if function is not self.delayed:
            return super().call(peer, function, *args)
        self.delayed = None
        call = functools.partial(super().call, peer, function, *args)

        def answer_late():
            answer = None if self.before_it_runs else call().result()
            self.is_held.set()
            self.is_released.wait(30.0)
            late.set_result(call().result() if self.before_it_runs else answer)

        self.late = threading.Thread(target=answer_late, daemon=True)
        self.late.start()
        return late

    def release(self):
        """Let the late answer go, and wait until whoever asked has it."""
        self.is_released.set()
        self.late.join(30.0)


class HereLauncher(Launcher):
    def __init__(self):
        self.engine = Scripted()

    def replace(self, worker):
        host.close_all()

    def close(self, timeout):
        self.engine.close()


class HereCollector(RemoteCollector):
    kind = "RPCCollector"
    _scheme_class = RPCWeightSyncScheme

    def _launch(self):
        return HereLauncher()


def here(*, sync=True, **options):
    restarts = {"on_worker_failure": "restart", "max_restarts": 5, "timeout": 8 * TIMEOUT_S}
    return HereCollector(
        Troubled, Plain(), num_collectors=1, sync=sync, frames_per_batch=40, **restarts, **options
    )


@pytest.mark.parametrize("delayed", [host.report_of, host.events_of])
def test_a_report_from_before_a_worker_was_replaced_does_not_count_afterwards(delayed):
    with here() as collector:
        gather(collector, 3)
        handle, engine = collector.pool.handles[0], collector.launcher.engine
        engine.delayed = delayed
        collector.stats()
        assert engine.is_held.wait(30.0)
        handle.failure = WorkerRaised(0, "it raised meanwhile")
        gather(collector, 1)
        assert handle.generation == 1
        engine.release()
        gather(collector, 1)
        stats = collector.stats()
        assert stats["restarts"] == 1
        assert stats["collected"] == stats["delivered"] == 200


def test_counts_that_arrive_late_do_not_replace_newer_ones():
    with here() as collector:
        gather(collector, 1)
        handle, engine = collector.pool.handles[0], collector.launcher.engine
        engine.delayed = host.report_of
        collector.stats()
        assert engine.is_held.wait(30.0)
        gather(collector, 2)
        engine.release()
        assert handle.reported_counts()["collected"] == 120


def test_a_call_for_events_that_fails_is_named_and_the_worker_is_replaced():
    with here() as collector:
        for times in (1, 2):
            collector.launcher.engine.failing = host.events_of
            wait_until(lambda: bool(collector.stats()) and bool(collector.pool.failed()))
            assert "RuntimeError: cannot be called" in str(collector.pool.handles[0].failure)
            gather(collector, 1)
            assert collector.stats()["restarts"] == times


def test_messages_reach_a_worker_in_their_order_although_calls_overtake_each_other():
    with here(sync=False) as collector:
        handle, engine = collector.pool.handles[0], collector.launcher.engine
        engine.before_it_runs, engine.delayed = True, host.send_to
        gather(collector, 2)  # each orders another one
        assert engine.is_held.wait(30.0)  # the order of the third; that of the fourth has come
        engine.release()
        steps = torch.cat([collector.next()["observation"][0, :, 1] for _ in range(3)])
        assert steps.tolist() == [frame % 13 for frame in range(80, 200)]
        assert handle.reported_counts()["collected"] >= 200
