"""The promises hold whatever the wire format and the link: whole versions, with true stamps."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
import torch

from sync import WIRES, Link, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from tests.promises.coarse_probe import CoarsePolicy, be_coarse, read_coarsely
from tests.promises.probe import CALLS, VALUE, VERSION, flood, read, trial, wait_until

SCHEMES = {"shared_mem": SharedMemWeightSyncScheme, "multiprocess": MultiProcessWeightSyncScheme}
LOSSY = ("bfloat16", "float16", "int8")
LINKS = {"direct": None, "linked": Link(latency_ms=3)}
LOSSY_LINK = Link(latency_ms=2, jitter_ms=5, bandwidth_mbps=200, loss=0.05)


def once(*axes):
    """All combinations of the axes; only those where the places in all axes agree are not slow."""
    places = [{value: place for place, value in enumerate(axis)} for axis in axes]

    def is_quick(way):
        numbers = [place[value] for place, value in zip(places, way, strict=True)]
        return all(
            number % len(axis) == numbers[0] % len(axis)
            for number, axis in zip(numbers, axes, strict=True)
        )

    return [
        pytest.param(*way, marks=[] if is_quick(way) else pytest.mark.slow)
        for way in itertools.product(*axes)
    ]


def running(kind, wire, link=None, **options):
    target = read_coarsely if wire in LOSSY else read
    return trial(SCHEMES[kind](wire=wire, link=link), target=target, **options)


@pytest.mark.parametrize("link", [None, LOSSY_LINK], ids=["direct", "linked"])
@pytest.mark.parametrize(("wire", "kind"), once(WIRES, SCHEMES))
def test_a_flood_is_whole_worker_ids_mean_it_and_what_is_not_sent_reaches_nobody(kind, wire, link):
    with running(kind, wire, link) as trial_:
        if wire in LOSSY:
            be_coarse(trial_.policy)
        flood(trial_, calls=1_000, versions=100)
        trial_.publish(wait=True)
        version = trial_.publish(wait=True, worker_ids=[1])
        trial_.policy.hold(77)
        trial_.calls_from_now(50)
        found = [trial_.findings.get(worker, VALUE) for worker in range(3)]
        assert found == [version - 1, version, version - 1]
        assert trial_.findings.violations() == {}


@pytest.mark.parametrize(("wire", "kind", "link"), once(["int8", "bfloat16"], SCHEMES, LINKS))
def test_stopped_and_killed_workers_leave_the_others_whole(kind, wire, link):
    with running(kind, wire, LINKS[link]) as trial_:
        if wire in LOSSY:
            be_coarse(trial_.policy)
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
