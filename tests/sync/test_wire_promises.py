"""The promises hold whatever the wire format and the link: whole versions, with true stamps."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from sync import WIRES, Link, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from tests.promises.probe import (
    CALLS,
    STOP,
    VALUE,
    VERSION,
    VersionPolicy,
    call,
    flood,
    read,
    trial,
    wait_until,
)

SCHEMES = {"shared_mem": SharedMemWeightSyncScheme, "multiprocess": MultiProcessWeightSyncScheme}
EACH = pytest.mark.parametrize("kind", SCHEMES)
LOSSY = ("bfloat16", "float16", "int8")
ROUND = 128  # whole numbers below it come back from every format, once rounded


class CoarsePolicy(VersionPolicy):
    """Says its number where every bit arrives, and the number's remainder where floats travel."""

    def hold(self, number: int) -> None:
        super().hold(number)
        with torch.no_grad():
            for tensor in (*self.parameters(), self.mean):
                tensor.fill_(number % ROUND)

    def forward(self) -> tuple[float, float]:
        number, exact = self.extra, torch.aminmax(self.steps)
        numbers = {number, int(exact.min), int(exact.max)}
        for tensor in (*self.parameters(), self.mean):
            low, high = torch.aminmax(tensor.detach().round())
            if (low, high) != (number % ROUND, number % ROUND):
                numbers |= {-1}
        return float(min(numbers)), float(max(numbers))


def read_coarsely(scheme, worker, findings, width, background=False):
    """As the probe's `read`, with a policy that does not mind rounding."""
    torch.set_num_threads(1)
    policy = CoarsePolicy(width)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect(background=background)
    while not findings.get(worker, STOP):
        call(scheme, policy, worker, findings, background)
    scheme.shutdown()


def running(kind, wire, link=None, **options):
    target = read_coarsely if wire in LOSSY else read
    return trial(SCHEMES[kind](wire=wire, link=link), target=target, **options)


def coarse(running, wire):
    """Have the trainer hold what the workers look for."""
    if wire in LOSSY:
        running.policy.__class__ = CoarsePolicy


@pytest.mark.parametrize("wire", WIRES)
@EACH
def test_no_call_is_torn_or_wrongly_stamped_under_a_flood(kind, wire):
    with running(kind, wire) as trial_:
        coarse(trial_, wire)
        flood(trial_, calls=3_000, versions=100)
        assert trial_.findings.violations() == {}


@pytest.mark.parametrize("wire", WIRES)
@EACH
def test_no_call_is_torn_over_a_link_that_loses_and_jitters(kind, wire):
    link = Link(latency_ms=2, jitter_ms=5, bandwidth_mbps=200, loss=0.05)
    with running(kind, wire, link, workers=2) as trial_:
        coarse(trial_, wire)
        flood(trial_, calls=1_000, versions=100)
        trial_.scheme.wait_async()
        assert trial_.findings.violations() == {}


@pytest.mark.parametrize("link", [None, Link(latency_ms=3)], ids=["direct", "linked"])
@pytest.mark.parametrize("wire", WIRES)
@EACH
def test_what_is_not_sent_reaches_nobody_and_worker_ids_mean_it(kind, wire, link):
    with running(kind, wire, link) as trial_:
        coarse(trial_, wire)
        trial_.publish(wait=True)
        version = trial_.publish(wait=True, worker_ids=[1])
        trial_.policy.hold(77)
        trial_.calls_from_now(50)
        found = [trial_.findings.get(worker, VALUE) for worker in range(3)]
        assert found == [version - 1, version, version - 1]
        assert trial_.findings.violations() == {}


@pytest.mark.parametrize("link", [None, Link(latency_ms=2, jitter_ms=2)], ids=["direct", "linked"])
@pytest.mark.parametrize("wire", ["int8", "delta"])
@EACH
def test_stopped_and_killed_workers_leave_the_others_whole(kind, wire, link):
    with running(kind, wire, link) as trial_:
        coarse(trial_, wire)
        stopped, killed = trial_.processes[1].pid, trial_.processes[2].pid
        for _ in range(30):
            trial_.publish()
        os.kill(stopped, signal.SIGSTOP)
        os.kill(killed, signal.SIGKILL)
        before = trial_.findings.get(0, CALLS)
        for _ in range(100):
            version = trial_.publish(worker_ids=[0, 1])
        os.kill(stopped, signal.SIGCONT)
        for worker in (0, 1):
            wait_until(lambda worker=worker: trial_.findings.get(worker, VERSION) == version)
        assert trial_.findings.get(0, CALLS) > before
        assert trial_.findings.violations() == {}


def test_the_coarse_probe_sees_what_it_should():
    policy = CoarsePolicy(8)
    policy.hold(300)
    assert policy() == (300, 300)
    with torch.no_grad():
        policy.body[1].bias[3] += 1
    low, high = policy()
    assert low != high
