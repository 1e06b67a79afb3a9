"""Promises 2 and 3: one policy call sees one version, and the stamp says which."""

from __future__ import annotations

import itertools
import os
import random
import signal

import pytest

from sync import HogwildWeightSyncScheme
from tests.promises.probe import CALLS, SCHEMES, START_METHODS, flood, trial

LARGE = 1024  # three layers of it make 12.6 MB


# Workers that are not forked take seconds to load torch: every strategy and every start method is
# met, and not every pair.
QUICK = [*[("tensordict", method) for method in START_METHODS], ("state_dict", "fork")]
ALL_WAYS = [
    pytest.param(*way, marks=[] if way in QUICK else pytest.mark.slow)
    for way in itertools.product(["tensordict", "state_dict"], START_METHODS)
]


@pytest.mark.parametrize(("strategy", "start_method"), ALL_WAYS)
@pytest.mark.parametrize("kind", SCHEMES)
def test_no_call_is_torn_or_wrongly_stamped_under_a_flood(kind, strategy, start_method):
    with trial(SCHEMES[kind](strategy), start_method=start_method) as running:
        flood(running, calls=8_000)
        assert running.findings.violations() == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCHEMES)
def test_no_call_in_forty_thousand_is_torn(kind):
    with trial(SCHEMES[kind]()) as running:
        flood(running, calls=40_000)
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", SCHEMES)
def test_no_call_of_a_large_model_is_torn(kind):
    with trial(SCHEMES[kind](), width=LARGE) as running:
        flood(running, calls=600, versions=150)
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", SCHEMES)
def test_no_call_is_torn_with_a_background_thread_and_reading(kind):
    with trial(SCHEMES[kind](), background=True) as running:
        flood(running, calls=8_000)
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", SCHEMES)
def test_blocking_sends_are_in_use_when_they_return(kind):
    with trial(SCHEMES[kind]()) as running:
        for _ in range(300):
            version = running.publish(wait=True)
            assert running.scheme.acknowledged == dict.fromkeys(range(3), version)
        running.calls_from_now(100)
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", SCHEMES)
def test_workers_stopped_in_the_middle_of_a_copy_stay_whole(kind):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with trial(SCHEMES[kind](), width=LARGE) as running:
        for _ in range(60):
            stopped = chance.choice(running.processes)
            os.kill(stopped.pid, signal.SIGSTOP)
            for _ in range(chance.randrange(1, 6)):
                running.publish()  # a stopped worker does not hold the trainer up
            os.kill(stopped.pid, signal.SIGCONT)
            for _ in range(chance.randrange(3)):
                running.publish()
        running.calls_from_now(20)
        assert running.findings.violations() == {}
        assert running.findings.total(CALLS) > 100


@pytest.mark.parametrize("kind", SCHEMES)
def test_unread_versions_are_coalesced_and_cost_no_memory(kind):
    with trial(SCHEMES[kind](), width=128) as running:
        os.kill(running.processes[0].pid, signal.SIGSTOP)
        for _ in range(600):
            last = running.publish()
        # At most two slots a worker (read now, offered next) and the one being written.
        assert running.scheme._sender.channel.memory_bytes <= 7 * 2**18
        os.kill(running.processes[0].pid, signal.SIGCONT)
        running.scheme.wait_async(30.0)
        assert running.scheme.acknowledged == dict.fromkeys(range(3), last)
        stats = running.scheme.stats["workers"][0]
        assert stats["coalesced"] > 500
        assert stats["coalesced"] + stats["applied"] == stats["addressed"]
        assert running.findings.violations() == {}


def test_the_probe_finds_torn_calls_in_hogwild():
    with trial(HogwildWeightSyncScheme(), width=256) as running:
        flood(running, calls=4_000)
        assert running.findings.violations()["torn"] > 0
