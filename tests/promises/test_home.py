"""Promises 2, 3 and 5 where the sender writes into the models of workers that rest."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sync import (
    MPTransport,
    MultiProcessWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from tests.promises.probe import (
    CALLS,
    START_METHODS,
    STOP,
    Findings,
    Trial,
    VersionPolicy,
    call,
    flood,
    trial,
    wait_until,
)

ROOT = Path(__file__).resolve().parents[2]
WAYS = pytest.mark.parametrize("background", [False, True], ids=["resting", "background"])


class PlainPolicy(VersionPolicy):
    """Without extra state: it can live at home."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    @property
    def extra(self) -> Any:
        return float(self.steps[0])

    @extra.setter
    def extra(self, number: int) -> None:
        """It is in the other tensors."""


def use_and_rest(
    scheme: WeightSyncScheme, worker: int, findings: Findings, width: int, background: bool
) -> None:
    """Policy calls with rests between them, which are short enough to end in mid-copy."""
    torch.set_num_threads(1)
    policy = PlainPolicy(width)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect(background=background)
    chance = random.Random(worker)
    while not findings.get(worker, STOP):
        call(scheme, policy, worker, findings, background)
        with scheme.resting():
            time.sleep(chance.choice((0.0, 1e-5, 1e-4)))
    scheme.shutdown()


KINDS: dict[str, tuple[type[WeightSyncScheme], type[Any]]] = {
    "shared_mem": (SharedMemWeightSyncScheme, SharedMemTransport),
    "multiprocess": (MultiProcessWeightSyncScheme, MPTransport),
}


def at_home(**options: Any) -> Any:
    scheme = KINDS[os.environ["LOCKSTEP_TEST_KIND"]][0]()
    return trial(scheme, target=use_and_rest, model=PlainPolicy, **options)


@pytest.fixture(autouse=True, params=KINDS)
def brought(request, monkeypatch):
    """How many versions the sender put into models, and how many it could not.

    Every test is of every scheme whose sender does so.
    """
    monkeypatch.setenv("LOCKSTEP_TEST_KIND", request.param)  # also in programs that tests start
    counts = {True: 0, False: 0}
    transport = KINDS[request.param][1]
    put_home = transport.put_home

    def counting(self: Any, slot: int) -> bool:
        done = put_home(self, slot)
        counts[done] += 1
        return done

    monkeypatch.setattr(transport, "put_home", counting)
    return counts


@pytest.mark.parametrize("start_method", START_METHODS)
@WAYS
def test_no_call_is_torn_or_wrongly_stamped_under_a_flood(background, start_method, brought):
    with at_home(background=background, start_method=start_method) as running:
        flood(running, calls=5_000)
        assert running.findings.violations() == {}
    assert brought[True] > 100
    assert brought[False] > 0


@WAYS
def test_blocking_sends_are_in_use_when_they_return(background, brought):
    with at_home(background=background) as running:
        for _ in range(500):
            version = running.publish(wait=True)
            assert running.scheme.acknowledged == dict.fromkeys(range(3), version)
        running.calls_from_now(100)
        assert running.findings.violations() == {}
    assert brought[True] > 100


@WAYS
def test_workers_that_are_stopped_and_go_on_stay_whole(background, brought):
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    rounds = 0
    deadline = time.monotonic() + 60.0
    with at_home(background=background) as running:
        while rounds < 60 or (brought[True] <= 20 and time.monotonic() < deadline):
            rounds += 1
            stopped = chance.choice(running.processes)
            os.kill(stopped.pid, signal.SIGSTOP)
            for _ in range(chance.randrange(1, 6)):
                running.publish()
            os.kill(stopped.pid, signal.SIGCONT)
            for _ in range(chance.randrange(3)):
                running.publish()
        running.calls_from_now(20)
        assert running.findings.violations() == {}
    assert brought[True] > 20


@WAYS
def test_workers_that_are_killed_and_replaced_stay_whole(background):
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    with at_home(background=background, workers=2) as running:
        for _ in range(8):
            for _ in range(chance.randrange(1, 200)):
                running.publish(worker_ids=[0, 1])
            running.processes[1].kill()
            running.processes[1].join()
            running.findings.set(1, CALLS, 0)
            running.processes[1] = _another(running, background)
            running.scheme.connect(worker_idx=1)
            wait_until(lambda: running.findings.get(1, CALLS) > 0)
            running.publish(wait=True)
        assert running.findings.violations() == {}


def _another(running: Trial, background: bool) -> Any:
    process = type(running.processes[1])(
        target=use_and_rest, args=(running.scheme, 1, running.findings, 64, background), daemon=True
    )
    process.start()
    return process


TRAINER = """
from tests.promises.test_home import at_home

with at_home(background={background}) as running:
    print(*(process.pid for process in running.processes), flush=True)
    while True:
        running.publish()
        if running.scheme.version % 50 == 0:
            print(running.scheme.version, running.findings.violations(),
                  running.findings.total({calls}), flush=True)
"""


@WAYS
def test_a_trainer_that_is_stopped_anywhere_holds_nobody_up(background):
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    code = TRAINER.format(background=background, calls=CALLS)
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    try:
        for _ in range(40):
            os.kill(trainer.pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0, 0.25))  # some are longer than workers wait for a turn
            os.kill(trainer.pid, signal.SIGCONT)
            line = trainer.stdout.readline()
            assert "{}" in line, line
        assert int(line.split()[-1]) > 100
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
