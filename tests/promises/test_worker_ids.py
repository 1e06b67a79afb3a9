"""Promise 4: `send(worker_ids=...)` changes those workers and nobody else."""

from __future__ import annotations

import pytest

from sync import SharedMemWeightSyncScheme
from tests.promises.behaviours import in_use, only_the_addressed_change
from tests.promises.probe import SCHEMES, VERSION, holding, trial


@pytest.mark.parametrize(
    ("kind", "wait", "strategy"),
    [
        ("shared_copy", False, "tensordict"),
        ("shared_zero_copy", True, "state_dict"),
        ("multiprocess", True, "tensordict"),
        ("own", False, "state_dict"),
    ],
)
def test_only_the_addressed_workers_change(kind, wait, strategy):
    with trial(SCHEMES[kind](strategy)) as running:
        only_the_addressed_change(running, rounds=3, wait=wait)


@pytest.mark.parametrize("kind", SCHEMES)
def test_each_worker_gets_its_own_weights(kind):
    scheme = SCHEMES[kind]()
    if isinstance(scheme, SharedMemWeightSyncScheme):
        scheme.per_worker_weights = True
    with trial(scheme) as running:
        scheme.send({0: holding(100), 2: holding(102)})
        running.calls_from_now(5)
        assert in_use(running) == [100, 0, 102]
        assert in_use(running, VERSION) == [1, 0, 1]
        scheme.send({0: holding(200), 1: holding(201)})
        running.calls_from_now(5)
        assert in_use(running) == [200, 201, 102]
        assert in_use(running, VERSION) == [2, 2, 1]
        assert running.findings.violations().get("torn", 0) == 0
