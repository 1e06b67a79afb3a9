"""While one thread replaces a worker, others publish, ask and shut down; an interrupt may come."""

from __future__ import annotations

import math
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
        member = collector.pool.members[victims[-1]]
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


def test_a_replacement_that_is_interrupted_is_made_by_the_next_call(tmp_path, interruptible):
    workers: list[int] = []

    def disturb() -> None:
        with replacing(collector, tmp_path, 0, 1):
            interrupt(interruptible)
            main_is_free.wait(30.0)

    def gather(times: float) -> None:
        """So many batches of each worker."""
        while min(workers.count(0), workers.count(1)) < times:
            workers.append(int(collector.next()["collector", "worker"][0, 0]))

    main_is_free = threading.Event()
    with ThreadPoolExecutor() as threads, make(tmp_path) as collector:
        collector.next()
        disturbed = threads.submit(disturb)
        with pytest.raises(KeyboardInterrupt):
            gather(math.inf)
        main_is_free.set()
        disturbed.result(timeout=30.0)
        workers.clear()
        threads.submit(gather, 4).result(timeout=30.0)
        assert balance(collector) == 0


def kill(member: Any) -> None:
    member.process.kill()
    member.process.join()


def test_who_is_replaced_while_it_is_asked_is_asked_again(tmp_path):
    with make(tmp_path, timeout=8.0) as collector:
        collector.next()
        pool = collector.pool
        tell = pool.tell

        def replace(member, *message):
            pool.tell = tell
            kill(member)
            pool.replace(member)  # as another thread may

        pool.tell = replace
        assert collector.getattr_env("worker") == [0, 1]
        assert collector.stats()["restarts"] == 1


def test_shutdown_while_another_thread_ends_a_worker_is_silent(tmp_path):
    with make(tmp_path) as collector, ThreadPoolExecutor() as threads:
        collector.next()
        member = collector.pool.members[0]
        process = member.process
        kill(member)
        member.process = Slow(process)
        replaced = threads.submit(collector.pool.replace, member)
        assert member.process.joined.wait(10.0)
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
