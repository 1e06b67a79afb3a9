"""While one thread replaces a worker, others publish, ask and shut down; an interrupt may come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from collectors import MultiAsyncCollector, ReplayBuffer
from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from tests.collectors.remote import support as far
from tests.collectors.troubled import Plain, Troubled, balance, hold, pids, told, wait_until
from tests.conftest import child_processes

SCHEMES = {"shared_mem": SharedMemWeightSyncScheme, "multiprocess": MultiProcessWeightSyncScheme}


class Latecomer(Troubled):
    """Made when its worker's door is open, which is when there is no such file."""

    def __init__(self, doors: str, worker: int):
        while os.path.exists(f"{doors}/{worker}"):
            time.sleep(0.002)
        super().__init__(worker)


def make(doors: Path, policy: Any = None, **options: Any) -> Any:
    return MultiAsyncCollector(
        Latecomer,
        policy or Plain(),
        num_workers=2,
        create_env_kwargs=told(2, doors=str(doors)),
        frames_per_batch=40,
        on_worker_failure="restart",
        **options,
    )


@contextmanager
def running(collector: Any) -> Iterator[ThreadPoolExecutor]:
    """While it runs free, threads that can do something else."""
    with collector, ThreadPoolExecutor() as threads:
        collector.start()
        collector.options.replay_buffer.wait(100, timeout=30.0)
        yield threads


@contextmanager
def replacing(collector: Any, doors: Path, *victims: int) -> Iterator[None]:
    """While these workers are dead and the successor of the last of them waits at its door."""
    door = doors / str(victims[-1])
    door.touch()
    try:
        alive = pids(collector)
        for victim in victims:
            os.kill(alive[victim], signal.SIGKILL)
        member = collector.pool.handles[victims[-1]]
        wait_until(lambda: member.restarts == 1 and member.failure is None)
        yield
    finally:
        door.unlink()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_published_meanwhile_are_in_use_when_the_update_returns(tmp_path, scheme):
    policy, sender = Plain(), SCHEMES[scheme]()
    collector = make(
        tmp_path,
        policy,
        replay_buffer=ReplayBuffer(1_000),
        weight_sync_schemes={"policy": sender},
    )
    with running(collector) as threads:
        hold(policy, 1)
        with replacing(collector, tmp_path, 0):
            update = threads.submit(collector.update_policy_weights_)
            wait_until(lambda: collector.policy_version == 1)
        update.result(timeout=30.0)
        assert sender.acknowledged[0] == 1
        assert collector.stats()["restarts"] == 1


def interrupt(thread: int) -> None:
    """What Ctrl-C does."""
    signal.pthread_kill(thread, signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[int]:
    """This thread, in which an interrupt raises, as it does outside of tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield threading.get_ident()
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_a_worker_is_replaced_ends_the_collector(tmp_path, interruptible):
    def disturb() -> None:
        with replacing(collector, tmp_path, 0, 1):
            interrupt(interruptible)
            interrupted.wait(30.0)

    interrupted = threading.Event()
    before = child_processes()
    with ThreadPoolExecutor() as threads, make(tmp_path) as collector:
        collector.next()
        disturbed = threads.submit(disturb)
        with pytest.raises(KeyboardInterrupt):
            _collect_for_ever(collector)
        interrupted.set()
        disturbed.result(timeout=30.0)
        with pytest.raises(RuntimeError, match="shut down because a call was interrupted"):
            collector.next()
    assert child_processes() <= before


def _collect_for_ever(collector: Any) -> None:
    while True:
        collector.next()


def kill(handle: Any) -> None:
    handle.process.kill()
    handle.process.join()


def test_a_worker_that_is_replaced_while_it_is_asked_is_asked_again(tmp_path):
    with make(tmp_path) as collector:
        collector.next()
        pool = collector.pool
        send = pool._send

        def replace(handle, message):
            pool._send = send
            kill(handle)
            pool.replace(handle)  # as another thread may

        pool._send = replace
        assert collector.getattr_env("worker") == [0, 1]
        assert collector.stats()["restarts"] == 1


def test_shutdown_while_another_thread_ends_a_worker_is_silent(tmp_path):
    with make(tmp_path) as collector, ThreadPoolExecutor() as threads:
        collector.next()
        member = collector.pool.handles[0]
        process = member.process
        kill(member)
        member.process = Slow(process)
        replaced = threads.submit(collector.pool.replace, member)
        assert member.process.joined.wait(30.0)
        collector.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            replaced.result()


class Slow:
    """A process whose end takes a while."""

    def __init__(self, process: Any):
        self.process, self.joined = process, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)

    def join(self, timeout: float) -> None:
        self.joined.set()
        time.sleep(0.5)
        self.process.join(timeout)


def test_an_interrupted_shutdown_leaves_no_worker(tmp_path, interruptible):
    with ThreadPoolExecutor() as threads:
        collector = make(tmp_path)
        collector.next()
        shut_down_interrupted(collector, pids(collector), threads, interruptible)


def test_an_interrupted_shutdown_leaves_no_host(interruptible):
    with ThreadPoolExecutor() as threads:
        collector = far.make("distributed", Troubled, Plain(), frames_per_batch=40)
        collector.next()
        shut_down_interrupted(collector, far.host_pids(collector), threads, interruptible)


def shut_down_interrupted(
    collector: Any, alive: list[int], threads: ThreadPoolExecutor, thread: int
) -> None:
    """None of these processes answers, and patience ends before the time does."""
    for pid in alive:
        os.kill(pid, signal.SIGSTOP)
    wait = threads.submit(lambda: (time.sleep(0.5), interrupt(thread)))
    with pytest.raises(KeyboardInterrupt):
        collector.shutdown(timeout=60.0)
    wait.result()
    assert not any(psutil.pid_exists(pid) for pid in alive)


def test_a_dropped_batch_of_a_dead_worker_frees_no_memory_of_its_successor(tmp_path):
    with make(tmp_path) as collector:
        state = collector.state_dict()
        wait_until(lambda: collector.stats()["in_flight"] == 2 * 2 * 40)
        os.kill(pids(collector)[0], signal.SIGKILL)
        wait_until(lambda: bool(collector.stats()) and bool(collector.pool.failed()))
        collector.getattr_env("worker")  # which replaces it
        collector.load_state_dict(state)
        free = collector.pool.handles[0]._free
        assert len(free) == len(set(free)) == 2
        for _ in range(6):
            collector.next()
        assert balance(collector) == 0
