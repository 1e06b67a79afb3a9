"""What the pulse may take for a failure of a host, and what it may not."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from collectors.remote import node as far
from collectors.remote.base import RemoteCollector
from collectors.remote.launcher import Launcher
from sync import RPCWeightSyncScheme, WorkerRaised
from tests.collectors.remote.support import host_pids
from tests.collectors.remote.test_failures import gather, troubled
from tests.collectors.troubled import Plain, Troubled, wait_until
from tests.sync.remote.support import Threads

TIMEOUT_S = 3.0


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
    """Hosts are threads of this process; the next answer that a thread of some name asks for comes
    when it is let go."""

    asker = "nobody"
    awaits = "report"
    fault = ""

    def __init__(self):
        super().__init__()
        self.held_back = threading.Event()
        self.let_go = threading.Event()

    def call(self, peer, function, *args):
        answer = super().call(peer, function, *args)
        asked = threading.current_thread().name == self.asker and self.awaits in args
        if not asked:
            return answer
        self.asker = "nobody"
        late = Future()

        def answer_late():
            reply = answer.result()
            self.held_back.set()
            self.let_go.wait(30.0)
            late.set_result(reply)

        self.late = threading.Thread(target=answer_late, daemon=True)
        self.late.start()
        return late

    def release(self):
        """Let the late answer go, and wait until whoever asked has it."""
        self.let_go.set()
        self.late.join(30.0)

    def gone(self, peer):
        if self.fault and threading.current_thread().name == "lockstep-pulse":
            fault, self.fault = self.fault, ""
            raise RuntimeError(fault)
        return super().gone(peer)


class HereFleet(Launcher):
    def __init__(self):
        self.engine = Scripted()

    def replace(self, host):
        far.close_all()

    def close(self, timeout):
        self.engine.close()


class HereCollector(RemoteCollector):
    kind = "RPCCollector"
    _scheme_class = RPCWeightSyncScheme

    def _launch(self, num_hosts):
        return HereFleet()


def here(*, sync=True, **options):
    restarts = {"on_worker_failure": "restart", "max_restarts": 5, "timeout": 8 * TIMEOUT_S}
    return HereCollector(
        Troubled, Plain(), num_collectors=1, sync=sync, frames_per_batch=40, **restarts, **options
    )


@pytest.mark.parametrize("asker", ["MainThread", "lockstep-pulse"])
def test_a_report_from_before_a_host_was_replaced_does_not_count_afterwards(asker):
    with here() as collector:
        gather(collector, 3)
        handle, engine = collector.pool.handles[0], collector.launcher.engine
        for _ in range(9):  # its accounts are numbered, and so are its successor's
            collector.stats()
        engine.asker = asker
        collector.stats()
        assert engine.held_back.wait(30.0)
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
        engine.asker = "MainThread"
        collector.stats()
        assert engine.held_back.wait(30.0)
        gather(collector, 2)
        engine.release()
        assert handle.reported_counts()["collected"] == 120


def test_an_error_in_the_pulse_is_told_and_the_pulse_goes_on():
    with here() as collector:
        for times in (1, 2):
            collector.launcher.engine.fault = "cannot feel it"
            wait_until(lambda: bool(collector.stats()) and bool(collector.pool.failed()))
            assert "RuntimeError: cannot feel it" in str(collector.pool.handles[0].failure)
            gather(collector, 1)
            assert collector.stats()["restarts"] == times


def test_batches_of_a_host_are_taken_in_their_order():
    with here(sync=False) as collector:
        handle, engine = collector.pool.handles[0], collector.launcher.engine
        engine.asker, engine.awaits = "MainThread", "collect"
        gather(collector, 2)
        assert engine.held_back.wait(30.0)  # the answer with the third batch
        wait_until(lambda: handle.reported_counts()["collected"] == 160)
        engine.release()
        steps = torch.cat([collector.next()["observation"][0, :, 1] for _ in range(2)])
        assert steps.tolist() == [frame % 13 for frame in range(80, 160)]
