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
from tests.promises.behaviours import unread_versions_are_coalesced
from tests.promises.probe import CALLS, SCHEMES, START_METHODS, flood, trial

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
        for _ in range(30):  # blocking sends are in use when they return
            version = running.publish(wait=True)
            assert running.scheme.acknowledged == dict.fromkeys(range(3), version)
        running.calls_from_now(20)
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


@pytest.mark.parametrize("kind", SCHEMES)
def test_unread_versions_are_coalesced_and_cost_no_memory(kind):
    with trial(SCHEMES[kind](), width=128) as running:
        unread_versions_are_coalesced(running, sends=150)


def test_the_probe_finds_torn_calls_in_hogwild():
    with trial(HogwildWeightSyncScheme(), width=256) as running:
        flood(running, calls=1_000)
        assert running.findings.violations()["torn"] > 0
