"""Promise 1: what the trainer changes reaches a worker by `send`, or not at all."""

from __future__ import annotations

import pytest

from sync import HogwildWeightSyncScheme
from tests.promises.behaviours import UNSENT, in_use, unsent_changes_reach_nobody
from tests.promises.probe import SCHEMES, VERSION, trial


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
        unsent_changes_reach_nobody(running, times=20)  # also before the first send
        for _ in range(5):
            running.publish(wait=True)
            unsent_changes_reach_nobody(running, times=20)
        assert running.findings.violations() == {}


def test_the_probe_finds_aliasing_in_hogwild():
    with trial(HogwildWeightSyncScheme()) as running:
        running.policy.hold(UNSENT)
        running.calls_from_now(20)
        assert in_use(running, VERSION) == [0, 0, 0]
        assert running.findings.violations() != {}
