"""Promises 2 and 3: one policy call sees one version, and the stamp says which.

Floods find gross faults of whole mechanisms. What depends on the order of single steps is tested in
every order by `tests/sync/local/test_board.py`.
"""

from __future__ import annotations

import itertools
import os
import random
import signal

import pytest

from sync import HogwildWeightSyncScheme
from sync.local.channel import LocalSender
from tests.promises.probe import CALLS, SCHEMES, SHARED_BY_ALL, START_METHODS, flood, trial

LARGE = 1024  # three layers of it make 12.6 MB
STRATEGIES = ("tensordict", "state_dict")


def slow_unless(quick, *axes):
    """All combinations of the axes, of which only the `quick` ones are not slow."""
    return [
        pytest.param(*way, marks=[] if way in quick else pytest.mark.slow)
        for way in itertools.product(*axes)
    ]


WAYS = slow_unless(
    [
        ("shared_copy", "tensordict", "fork"),
        ("shared_zero_copy", "state_dict", "forkserver"),
        ("multiprocess", "tensordict", "forkserver"),
        ("own", "state_dict", "fork"),
    ],
    SCHEMES,
    STRATEGIES,
    START_METHODS,
)


@pytest.mark.parametrize(("kind", "strategy", "start_method"), WAYS)
def test_no_call_is_torn_or_wrongly_stamped_under_a_flood(kind, strategy, start_method):
    with trial(SCHEMES[kind](strategy), start_method=start_method) as running:
        flood(running, calls=2_000)
        assert running.findings.violations() == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCHEMES)
def test_no_call_in_forty_thousand_is_torn(kind):
    with trial(SCHEMES[kind]()) as running:
        flood(running, calls=40_000)
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", slow_unless([("shared_zero_copy",), ("multiprocess",)], SCHEMES))
def test_no_call_is_torn_with_a_background_thread_and_reading(kind):
    with trial(SCHEMES[kind](), background=True) as running:
        flood(running, calls=2_000)
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_blocking_sends_are_in_use_when_they_return(kind):
    with trial(SCHEMES[kind]()) as running:
        for _ in range(100):
            version = running.publish(wait=True)
            assert running.scheme.acknowledged == dict.fromkeys(range(3), version)
        running.calls_from_now(20)
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", slow_unless([("shared_copy",), ("multiprocess",)], SCHEMES))
def test_workers_with_a_large_model_stay_whole_when_they_are_stopped_in_a_copy(kind):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with trial(SCHEMES[kind](), width=LARGE) as running:
        for _ in range(25):
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


def memory_of_blocks(channel):
    if isinstance(channel, LocalSender):
        return channel.blocks.memory_bytes
    return len(channel._pool) * channel.layout.nbytes


@pytest.mark.parametrize("kind", SCHEMES)
def test_unread_versions_are_coalesced_and_cost_no_memory(kind):
    with trial(SCHEMES[kind](), width=128) as running:
        os.kill(running.processes[0].pid, signal.SIGSTOP)
        for _ in range(150):
            last = running.publish()
        # At most two slots a worker (read now, offered next) and the one being written.
        assert memory_of_blocks(running.scheme._sender.channel) <= 7 * 2**18
        os.kill(running.processes[0].pid, signal.SIGCONT)
        running.scheme.wait_async(30.0)
        assert running.scheme.acknowledged == dict.fromkeys(range(3), last)
        stats = running.scheme.stats["workers"][0]
        assert stats["coalesced"] > 125
        assert stats["coalesced"] + stats["applied"] == stats["addressed"]
        assert running.findings.violations() == {}


def test_the_probe_finds_torn_calls_in_hogwild():
    with trial(HogwildWeightSyncScheme(), width=256) as running:
        flood(running, calls=1_000)
        assert running.findings.violations()["torn"] > 0
