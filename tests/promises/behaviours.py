"""What every mechanism promises, as functions of a trial, wherever its workers are."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import pytest

from sync import WorkerDied, WorkerRaised, WorkerTimeout
from sync.local.worker_connections import LocalSender
from tests.promises.probe import (
    SPOILED,
    VALUE,
    VERSION,
    Trial,
    stop,
    wait_until,
)

WORKERS = 3
UNSENT = 1_000_000


def in_use(running: Trial, field: int = VALUE) -> list[int]:
    """By worker, the number that its weights say, or their version."""
    return [running.findings.get(worker, field) for worker in range(WORKERS)]


def unsent_changes_reach_nobody(running: Trial, times: int = 1) -> None:
    """What the trainer changes in place and does not send is seen by no worker."""
    sent = running.scheme.version
    for number in range(times):
        running.policy.hold(UNSENT + number)
    running.calls_from_now(20)
    assert in_use(running) == in_use(running, VERSION) == [sent] * WORKERS


def only_the_addressed_change(running: Trial, *, rounds: int = 1, wait: bool = True) -> list[int]:
    """Sends to some workers, and what each has in the end."""
    expected = [0] * WORKERS
    for chosen in [[0], [2], [0, 1], [1], [2, 0], [0, 1, 2], [1]] * rounds:
        version = running.publish(wait=wait, worker_ids=chosen)
        running.scheme.wait_async()
        for worker in chosen:
            expected[worker] = version
        running.calls_from_now(5)
        assert in_use(running) == in_use(running, VERSION) == expected
        assert running.scheme.acknowledged == dict(enumerate(expected))
    assert running.findings.violations() == {}
    return expected


def unread_versions_are_coalesced(running: Trial, sends: int) -> None:
    """Versions that a worker does not read cost no memory; it has the newest afterwards."""
    stop(running.processes[0].pid)
    for _ in range(sends):
        last = running.publish()
    # At most two blocks a worker (read now, offered next) and the one being written.
    channel = running.scheme._sender.channel
    nbytes = (
        channel.blocks.memory_bytes
        if isinstance(channel, LocalSender)
        else len(channel._pool) * channel.layout.nbytes
    )
    assert nbytes <= 7 * 2**18
    os.kill(running.processes[0].pid, signal.SIGCONT)
    running.scheme.wait_async(30.0)
    assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), last)
    stats = running.scheme.stats["workers"][0]
    assert stats["coalesced"] > 5 / 6 * sends
    assert stats["coalesced"] + stats["applied"] == stats["addressed"]
    assert running.findings.violations() == {}


def a_worker_that_cannot_apply_is_named(running: Trial, how: int, message: str) -> None:
    """Worker 1 raises, with its traceback; the others go on, and so does it when it is whole."""
    running.publish(wait=True)
    running.findings.set(1, SPOILED, how)
    running.calls_from_now(5)
    with pytest.raises(WorkerRaised, match="worker 1") as raised:
        running.publish(wait=True)
    assert raised.value.worker_idx == 1
    assert message in str(raised.value)
    assert "Traceback (most recent call last)" in str(raised.value)
    # The others have this version, and the next send to them succeeds.
    version = running.scheme.version
    assert running.scheme.acknowledged[0] == running.scheme.acknowledged[2] == version
    running.publish(wait=True, worker_ids=[0, 2])
    # When the worker is whole again, so is everything.
    running.findings.set(1, SPOILED, 0)
    running.calls_from_now(5)
    version = running.publish(wait=True)
    assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), version)


def a_hanging_worker_is_named_and_may_come_back(running: Trial) -> None:
    """Worker 0 does not answer within the scheme's timeout, which should be short."""
    stop(running.processes[0].pid)
    with pytest.raises(WorkerTimeout, match=r"worker 0 .*did not acknowledge version 1"):
        running.publish(wait=True)
    running.scheme._sender._timeout = 30.0
    running.publish(wait=True, worker_ids=[1, 2])
    os.kill(running.processes[0].pid, signal.SIGCONT)
    wait_until(lambda: running.scheme.acknowledged[0] == 1)
    version = running.publish(wait=True)
    assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), version)
    assert running.findings.violations() == {}


def a_killed_worker_is_named(running: Trial, died: str) -> None:
    """Worker 1 is killed, and the others go on."""
    running.scheme.describe_worker(1, "CartPole-v1")
    running.publish(wait=True)
    running.processes[1].kill()
    with pytest.raises(WorkerDied, match=died):
        running.publish(wait=True)
    wait_until(lambda: not running.processes[1].is_alive())  # its connections end first
    for _ in range(20):
        version = running.publish(wait=True, worker_ids=[0, 2])
    running.calls_from_now(10)
    assert in_use(running)[::2] == [version, version]


def killed_workers_are_named_and_replaced(
    running: Trial, replace: Callable[[Trial, int], None], died: str, rounds: int = 1
) -> None:
    """Worker 1 is killed; the others go on, and another process takes its place, so many times.

    replace: starts a process in a dead worker's place.
    """
    chance = random.Random(0)
    a_killed_worker_is_named(running, died)
    for round_ in range(rounds):
        if round_:
            for _ in range(chance.randrange(30)):
                running.publish()
            running.processes[1].kill()
            wait_until(lambda: not running.processes[1].is_alive())
        if round_ % 2 == 0:  # it stays dead, and nobody keeps quiet about it
            with pytest.raises(WorkerDied, match="worker 1"):
                running.publish(wait=True)
        running.policy.hold(UNSENT)  # nobody may see it
        running.findings.set(1, VERSION, 0)
        replace(running, 1)
        running.scheme.connect(worker_idx=1)
        assert running.scheme.acknowledged[1] == running.scheme.version
        running.calls_from_now(5)
        assert running.findings.get(1, VALUE) == running.scheme.version
    version = running.publish(wait=True)
    assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), version)
    assert running.scheme.stats["workers"][1]["restarts"] == rounds
    assert running.findings.violations() == {}
