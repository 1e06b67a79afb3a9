"""Large versions for many workers go from peer to peer, and the promises hold there, too."""

from __future__ import annotations

import os
import signal

import pytest

from sync import WorkerDied
from tests.promises.probe import VALUE, flood, wait_until
from tests.promises.remote_probe import Peers, trial

WORKERS = 6  # 0 and 1 are sent blocks by the trainer, 2 and 3 by 0, 4 and 5 by 1
LARGE = 512


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Peers outlive a test here; `Peers.close` looks for what is left."""


@pytest.fixture(scope="module", params=["distributed", "rpc"])
def peers(request):
    group = Peers(request.param, WORKERS)
    yield group
    group.close()


def handed_on(running):
    return running.scheme.stats["handed_on"]


def publish_until_handed_on(running):
    """Peers meet when they are needed first."""
    before = handed_on(running)

    def four_of_six():
        nonlocal before
        before = handed_on(running)
        running.publish(wait=True)
        return handed_on(running) - before == 4

    wait_until(four_of_six)


def test_the_trainer_sends_a_version_to_two_of_six(peers, tmp_path):
    with trial(peers, tmp_path, width=LARGE) as running:
        publish_until_handed_on(running)
        for _ in range(5):
            before = handed_on(running)
            version = running.publish(wait=True)
            assert handed_on(running) - before == 4
            assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), version)
        running.calls_from_now(5)
        assert [running.findings.get(w, VALUE) for w in range(WORKERS)] == [version] * WORKERS
        assert running.findings.violations() == {}


def test_small_versions_take_the_short_way(peers, tmp_path):
    with trial(peers, tmp_path, width=16) as running:
        for _ in range(5):
            running.publish(wait=True)
        assert handed_on(running) == 0


def test_nothing_is_torn_under_a_flood(peers, tmp_path):
    with trial(peers, tmp_path, width=LARGE, background=True) as running:
        publish_until_handed_on(running)
        flood(running, calls=100, versions=60)
        assert running.findings.violations() == {}


def test_who_is_not_addressed_hands_nothing_on(peers, tmp_path):
    with trial(peers, tmp_path, width=LARGE) as running:
        publish_until_handed_on(running)
        before = handed_on(running)
        version = running.publish(wait=True, worker_ids=[2, 3, 4])
        assert handed_on(running) == before
        running.calls_from_now(5)
        found = [running.findings.get(w, VALUE) for w in range(WORKERS)]
        assert found == [version - 1] * 2 + [version] * 3 + [version - 1]


def test_a_peer_that_hands_nothing_on_costs_time_and_no_version(peers, tmp_path):
    with trial(peers, tmp_path, width=LARGE, timeout=6.0) as running:
        publish_until_handed_on(running)
        os.kill(running.processes[0].pid, signal.SIGSTOP)
        version = running.publish()
        for others in range(1, WORKERS):
            wait_until(lambda w=others: running.scheme.acknowledged[w] == version)
        os.kill(running.processes[0].pid, signal.SIGCONT)
        version = running.publish(wait=True)
        assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), version)
        assert running.findings.violations() == {}


def test_a_killed_peer_takes_nobody_with_it(peers, tmp_path):
    with trial(peers, tmp_path, width=LARGE) as running:
        publish_until_handed_on(running)
        victim = running.processes[0]
        victim.kill(signal.SIGSTOP)  # so that those who ask it are still waiting when it dies
        version = running.publish()
        victim.kill()
        with pytest.raises(WorkerDied, match="worker 0"):
            running.scheme.wait_async(30.0)
        for others in range(1, WORKERS):
            wait_until(lambda w=others: running.scheme.acknowledged[w] == version)
        version = running.publish(wait=True, worker_ids=[1, 2, 3, 4, 5])
        peers.replace(0)
        running.findings.set(0, 0, 0)
        running.begin(0)
        running.scheme.connect(worker_idx=0)
        publish_until_handed_on(running)  # it hands on what its predecessor did
        assert running.findings.violations() == {}
