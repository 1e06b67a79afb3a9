"""While one thread replaces a worker, others publish, ask and shut down; an interrupt may come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from collectors import MultiAsyncCollector, ReplayBuffer
from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from tests.collectors.troubled import Plain, Troubled, hold, pids, told, wait_until

SCHEMES = {"shared_mem": SharedMemWeightSyncScheme, "multiprocess": MultiProcessWeightSyncScheme}


class Latecomer(Troubled):
    """Made when its door is open, which is when there is no such file."""

    def __init__(self, door: str, **options: Any):
        while os.path.exists(door):
            time.sleep(0.002)
        super().__init__(**options)


@pytest.fixture
def door(tmp_path: Path) -> Path:
    return tmp_path / "door"


def make(door: Path, policy: Any = None, *, workers: int = 2, **options: Any) -> Any:
    return MultiAsyncCollector(
        Latecomer,
        policy or Plain(),
        num_workers=workers,
        create_env_kwargs=told(workers, door=str(door)),
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
def replacing(collector: Any, door: Path) -> Iterator[None]:
    """While worker 0 is dead and its successor waits at the door."""
    door.touch()
    try:
        os.kill(pids(collector)[0], signal.SIGKILL)
        member = collector.crew.members[0]
        wait_until(lambda: member.restarts == 1 and member.failure is None)
        yield
    finally:
        door.unlink()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_published_meanwhile_are_in_use_when_the_update_returns(door, scheme):
    policy, sender = Plain(), SCHEMES[scheme]()
    collector = make(
        door,
        policy,
        replay_buffer=ReplayBuffer(1_000),
        weight_sync_schemes={"policy": sender},
    )
    with running(collector) as threads:
        hold(policy, 1)
        with replacing(collector, door):
            update = threads.submit(collector.update_policy_weights_)
            wait_until(lambda: collector.policy_version == 1)
        update.result(timeout=30.0)
        assert sender.acknowledged[0] == 1
        assert collector.stats()["restarts"] == 1
