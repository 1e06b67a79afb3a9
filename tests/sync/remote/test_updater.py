"""The older way of saying it: whose turn an update is."""

from __future__ import annotations

import pytest
from torch import nn

from sync import RayRemoteWeightUpdater


class Handle:
    """An actor's, as far as an update that is not sent needs it."""

    class _actor_id:
        @staticmethod
        def hex():
            return "0" * 16


class Told(RayRemoteWeightUpdater):
    """Notes whom it would push to."""

    def _push(self, worker_ids, weights):
        self.pushed = list(worker_ids)


def pushed(updater, calls, **how):
    found = []
    for _ in range(calls):
        updater.update_weights(**how)
        found.append(updater.pushed)
    return found


def test_every_update_reaches_everybody_without_an_interval():
    updater = Told(nn.Linear(1, 1), [Handle(), Handle()])
    assert pushed(updater, 3) == [[0, 1]] * 3


def test_an_interval_leaves_workers_out_so_many_times():
    updater = Told(nn.Linear(1, 1), [Handle(), Handle()], max_interval=2)
    assert pushed(updater, 5) == [[0, 1], [], [], [0, 1], []]


def test_workers_that_are_named_have_turns_of_their_own():
    updater = Told(nn.Linear(1, 1), [Handle(), Handle()], max_interval=1)
    assert pushed(updater, 1, worker_ids=[1]) == [[1]]
    assert pushed(updater, 2) == [[0], [1]]


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match="max_interval=-1"):
        Told(nn.Linear(1, 1), [Handle()], max_interval=-1)


def test_an_updater_that_nobody_gave_workers_says_where_they_come_from():
    updater = RayRemoteWeightUpdater(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="has no workers: pass it remote_collectors, or pass it"):
        updater.update_weights()
