"""Promise 5: whatever happens to a worker becomes an exception that names it, in bounded time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from typing import Any

import pytest
import torch
from torch import nn

from sync import WeightSyncScheme, WorkerDied, WorkerError, WorkerRaised
from tests.promises.behaviours import (
    a_hanging_worker_is_named_and_may_come_back,
    a_worker_that_cannot_apply_is_named,
    killed_workers_are_named_and_replaced,
)
from tests.promises.probe import (
    ALIVE_AFTER,
    CALLS,
    SCHEMES,
    SHARED_BY_ALL,
    SPOILED,
    STOP,
    VERSION,
    Findings,
    Trial,
    VersionPolicy,
    call,
    read,
    stop,
    take_part,
    trial,
    wait_until,
)


def spoil(policy: VersionPolicy, how: int) -> None:
    """What a user's code might do to a worker's model behind the scheme's back."""
    layer = policy.body[0]
    if how == 1:
        del layer.bias
    elif how == 2:
        layer.weight = nn.Parameter(torch.zeros(3, 3))
    elif how == 3:
        layer.weight = nn.Parameter(layer.weight.detach().double())
    elif how == 4:
        layer.bias.data = layer.bias.data.half()


def read_and_break(
    scheme: WeightSyncScheme, worker: int, findings: Findings, width: int, background: bool
) -> None:
    """As `read`, but worker 1 spoils its model when told, and mends it when told."""
    policy = VersionPolicy(width)
    whole = dict(policy.body[0].named_parameters())
    take_part(scheme, worker, policy)
    spoiled = 0
    while not findings.get(worker, STOP):
        wanted = findings.get(worker, SPOILED)
        if wanted != spoiled:
            policy.body[0].weight, policy.body[0].bias = whole["weight"], whole["bias"]
            policy.body[0].bias.data = policy.body[0].bias.data.float()
            spoil(policy, wanted)
            spoiled = wanted
        try:
            call(scheme, policy, worker, findings, background)
        except (KeyError, ValueError):
            continue  # this worker's loop survives; the trainer has been told


@pytest.mark.parametrize(
    ("kind", "how", "message"),
    [
        ("shared_copy", 1, "lacks 'body.0.bias'"),
        ("shared_zero_copy", 2, "'body.0.weight' has shape [3, 3], expected [64, 64]"),
        ("multiprocess", 3, "'body.0.weight' is torch.float64, expected torch.float32"),
        ("own", 4, "'body.0.bias' is torch.float16, expected torch.float32"),
    ],
)
def test_a_worker_that_cannot_apply_is_named_with_its_traceback(kind, how, message):
    with trial(SCHEMES[kind](), target=read_and_break) as running:
        a_worker_that_cannot_apply_is_named(running, how, message)


def replace(running: Trial, worker: int) -> None:
    """Start another process in a dead one's place."""
    args = (running.scheme, worker, running.findings, 64)
    process = multiprocessing.get_context("fork").Process(target=read, args=args, daemon=True)
    process.start()
    running.processes[worker] = process


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_killed_worker_is_named_and_others_take_its_place_again_and_again(kind):
    died = r"worker 1 \(cpu, CartPole-v1\) died \(pid \d+\), (killed by SIG|its connection broke)"
    with trial(SCHEMES[kind]()) as running:
        killed_workers_are_named_and_replaced(running, replace, died, rounds=4)


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_a_worker_killed_while_the_trainer_waits_for_it_ends_the_wait(kind):
    with trial(SCHEMES[kind](timeout=60.0)) as running:
        victim = running.processes[2].pid
        stop(victim)  # so that the send cannot be answered
        killer = os.fork()
        if killer == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            signal.sigwait({signal.SIGALRM})
            os.kill(victim, signal.SIGKILL)
            os._exit(0)
        with pytest.raises(WorkerDied, match="worker 2"):
            running.publish(wait=True)
        os.waitpid(killer, 0)


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_a_hanging_worker_is_named_when_time_is_over_and_may_come_back(kind):
    with trial(SCHEMES[kind](timeout=0.5)) as running:
        a_hanging_worker_is_named_and_may_come_back(running)


def never_connects(scheme: Any, worker: int, findings: Findings, *_: Any) -> None:
    wait_until(lambda: bool(findings.get(worker, STOP)))


def cannot_take_it(scheme: WeightSyncScheme, worker: int, *_: Any) -> None:
    scheme.init_on_receiver(model=VersionPolicy(width=3), worker_idx=worker)
    scheme.connect()


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_a_rendezvous_that_cannot_complete_says_who_did_what(kind):
    scheme = SCHEMES[kind](connect_timeout=0.5)
    with (
        pytest.raises(WorkerError, match=r"worker 1 .*did not connect within 0\.5 s"),
        trial(scheme, target=never_connects),
    ):
        pass
    scheme = SCHEMES[kind]()
    with (
        pytest.raises(WorkerError, match=r"'body.0.weight' has shape \[3, 3\]"),
        trial(scheme, target=cannot_take_it),
    ):
        pass


def read_past_the_end(
    scheme: WeightSyncScheme, worker: int, findings: Findings, width: int, background: bool
) -> None:
    """As `read`, but when the trainer is dead this worker goes on with what it has."""
    policy = take_part(scheme, worker, VersionPolicy(width))
    with contextlib.suppress(ConnectionError):
        while True:
            call(scheme, policy, worker, findings, background)
            scheme.receive(timeout=1e-4)
    for _ in range(50):
        call(scheme, policy, worker, findings, background)
    findings.set(worker, ALIVE_AFTER, 1)


def train_for_ever(kind: str, width: int, findings: Findings) -> None:
    torch.set_num_threads(1)  # torch's threads do not survive a fork
    ready = trial(
        SCHEMES[kind](), workers=2, width=width, target=read_past_the_end, findings=findings
    )
    with ready as running:
        while True:
            running.publish()


@pytest.mark.parametrize(
    ("width", "times"), [pytest.param(64, 5, marks=pytest.mark.slow), (512, 2)]
)
@pytest.mark.parametrize("kind", SCHEMES)
def test_a_trainer_killed_in_the_middle_of_a_publish_leaves_workers_whole(kind, width, times):
    chance = random.Random(width)
    for _ in range(times):
        findings = Findings(2)
        trainer = os.fork()
        if trainer == 0:
            try:
                train_for_ever(kind, width, findings)
            finally:
                os._exit(1)
        enough = chance.randrange(10, 200)
        wait_until(lambda f=findings, n=enough: min(f.get(0, CALLS), f.get(1, CALLS)) > n)
        wait_until(lambda f=findings: f.get(0, VERSION) > 0)  # the trainer may be slow to begin
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        wait_until(lambda f=findings: f.total(ALIVE_AFTER) == 2)
        assert findings.violations() == {}
        assert findings.get(0, VERSION) > 0


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_workers_replaced_before_the_trainer_looked_are_not_taken_for_dead(kind):
    with trial(SCHEMES[kind]()) as running:
        running.publish(wait=True)
        for worker in (0, 1):
            running.processes[worker].kill()
            running.processes[worker].join()
        for worker in (0, 1):
            running.findings.set(worker, CALLS, 0)
            replace(running, worker)
        for worker in (0, 1):
            running.scheme.connect(worker_idx=worker)
        version = running.publish(wait=True)
        assert running.scheme.acknowledged == dict.fromkeys(range(3), version)
        assert running.findings.violations() == {}


def come_second(scheme: WeightSyncScheme, connect: bool) -> None:
    scheme.connect_timeout = 0.3
    scheme.init_on_receiver(model=VersionPolicy(), worker_idx=0)
    if connect:
        try:
            scheme.connect(background=False)
        except (ConnectionError, TimeoutError):
            os._exit(7)
    scheme.shutdown()


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_a_second_process_cannot_take_a_living_workers_place(kind):
    with trial(SCHEMES[kind](), workers=1) as running:
        ctx = multiprocessing.get_context("fork")
        for connect in (True, False, True, False):
            second = ctx.Process(target=come_second, args=(running.scheme, connect))
            second.start()
            while second.is_alive():
                running.publish()
            second.join()
            assert second.exitcode == (7 if connect else 0)
        running.scheme.wait_async()
        running.calls_from_now(10)
        assert running.findings.violations() == {}


def fail_at_once(scheme: WeightSyncScheme, worker: int) -> None:
    scheme.init_on_receiver(model=VersionPolicy(width=3), worker_idx=worker)
    try:
        scheme.connect()
    except ValueError:
        os._exit(7)


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_a_worker_that_failed_before_the_trainer_came_is_reported_with_its_reason(kind):
    ctx = multiprocessing.get_context("fork")
    with SCHEMES[kind]() as scheme:
        scheme.init_on_sender(model=VersionPolicy(), devices=["cpu"])
        worker = ctx.Process(target=fail_at_once, args=(scheme, 0))
        worker.start()
        worker.join()
        assert worker.exitcode == 7
        with pytest.raises(WorkerRaised, match=r"shape \[3, 3\], expected \[64, 64\]"):
            scheme.connect()
