"""Promise 4: `send(worker_ids=...)` changes those workers and nobody else."""

from __future__ import annotations

import pytest

from sync import SharedMemWeightSyncScheme
from tests.promises.probe import SCHEMES, VALUE, VERSION, VersionPolicy, trial


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
        expected = [0, 0, 0]
        for round_, chosen in enumerate([[0], [2], [0, 1], [1], [2, 0], [0, 1, 2], [1]] * 3):
            version = running.publish(wait=wait, worker_ids=chosen)
            running.scheme.wait_async()
            for worker in chosen:
                expected[worker] = version
            running.calls_from_now(5)
            found = [running.findings.get(w, VALUE) for w in range(3)]
            stamps = [running.findings.get(w, VERSION) for w in range(3)]
            assert found == stamps == expected, round_
            assert running.scheme.acknowledged == dict(enumerate(expected))
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", SCHEMES)
def test_each_worker_gets_its_own_weights(kind):
    def holding(number: int) -> VersionPolicy:
        policy = VersionPolicy()
        policy.hold(number)
        return policy

    scheme = SCHEMES[kind]()
    if isinstance(scheme, SharedMemWeightSyncScheme):
        scheme.per_worker_weights = True
    with trial(scheme) as running:
        scheme.send({0: holding(100), 2: holding(102)})
        running.calls_from_now(5)
        assert [running.findings.get(w, VALUE) for w in range(3)] == [100, 0, 102]
        assert [running.findings.get(w, VERSION) for w in range(3)] == [1, 0, 1]
        scheme.send({0: holding(200), 1: holding(201)})
        running.calls_from_now(5)
        assert [running.findings.get(w, VALUE) for w in range(3)] == [200, 201, 102]
        assert [running.findings.get(w, VERSION) for w in range(3)] == [2, 2, 1]
        assert running.findings.violations().get("torn", 0) == 0
