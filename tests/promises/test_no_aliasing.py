"""Promise 1: what the trainer changes reaches a worker by `send`, or not at all."""

from __future__ import annotations

import pytest

from sync import HogwildWeightSyncScheme
from tests.promises.probe import SCHEMES, VALUE, VERSION, trial

UNSENT = 1_000_000


@pytest.mark.parametrize(
    ("kind", "strategy", "width"),
    [
        ("shared_copy", "tensordict", 512),
        ("shared_zero_copy", "state_dict", 64),
        ("multiprocess", "state_dict", 512),
        ("own", "tensordict", 64),
    ],
)
def test_an_in_place_change_without_a_send_reaches_nobody(kind, strategy, width):
    with trial(SCHEMES[kind](strategy), width=width) as running:
        for _ in range(5):
            sent = running.publish(wait=True)
            for unsent in range(20):
                running.policy.hold(UNSENT + unsent)
            running.calls_from_now(20)
            for worker in range(3):
                assert running.findings.get(worker, VALUE) == sent
                assert running.findings.get(worker, VERSION) == sent
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", SCHEMES)
def test_nothing_reaches_a_worker_before_the_first_send(kind):
    with trial(SCHEMES[kind]()) as running:
        running.policy.hold(UNSENT)
        running.calls_from_now(20)
        assert [running.findings.get(w, VALUE) for w in range(3)] == [0, 0, 0]


def test_the_probe_finds_aliasing_in_hogwild():
    with trial(HogwildWeightSyncScheme()) as running:
        running.policy.hold(UNSENT)
        running.calls_from_now(20)
        assert [running.findings.get(w, VERSION) for w in range(3)] == [0, 0, 0]
        assert running.findings.violations() != {}
