"""Errors name the worker, and travel."""

from __future__ import annotations

import pickle

import pytest

from sync import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from sync.errors import combine

KINDS = [WorkerError, WorkerDied, WorkerRaised, WorkerTimeout]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_a_worker_error_that_has_its_workers_number_and_travels(kind):
    error = kind(3, "worker 3 (cuda:1) has gone home")
    assert isinstance(error, WorkerError)
    assert isinstance(error, RuntimeError)
    assert error.failures == {3: error}
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is kind
    for one in (error, twin):
        assert (one.worker_idx, str(one)) == (3, "worker 3 (cuda:1) has gone home")
        assert list(one.failures) == [3]


def test_one_failure_is_itself_and_several_are_told_together():
    died, late = WorkerDied(1, "worker 1 died"), WorkerTimeout(4, "worker 4 is late")
    assert combine({1: died}) is died
    both = combine({1: died, 4: late})
    assert both.worker_idx == 1
    assert both.failures == {1: died, 4: late}
    for text in ("2 workers", "worker 1 died", "worker 4 is late"):
        assert text in str(both)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_several_workers_travel_between_processes(kind):
    both = combine({1: kind(1, "one"), 2: WorkerDied(2, "two")})
    twin = pickle.loads(pickle.dumps(both))
    assert str(twin) == str(both)
    assert {k: (type(v), str(v)) for k, v in twin.failures.items()} == {
        1: (kind, "one"),
        2: (WorkerDied, "two"),
    }
