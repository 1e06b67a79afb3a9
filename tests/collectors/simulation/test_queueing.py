"""Clusters that are queueing systems with closed formulas.

Workers are customers of one server, the learner: each makes a batch (exponential), and waits until
it is taken and worked on (exponential). That is M/M/1//N, the machine repair model.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from collectors.simulation.costs import Cost, Costs
from collectors.simulation.simulator import Simulator
from tests.collectors.simulation.driving import drive

BATCHES = 20_000
BATCH_MS = 10.0
# Workers, and the load of the learner: one axis at a time, and all pairs in the slow tests.
PAIRS = [(1, 0.5), (16, 0.5), (64, 0.5), (16, 2.0)]
SLOW = [(n, load) for n in (1, 2, 4, 16, 64) for load in (0.5, 2.0) if (n, load) not in PAIRS]
CLUSTERS = [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]


def birth_death(births, deaths):
    """The probabilities of 0, 1, 2, ... customers, from the rates between them."""
    ratios = np.divide(births, deaths)
    weights = np.concatenate([[1.0], np.cumprod(ratios)])
    return weights / weights.sum()


def cluster(num_workers, **learner):
    costs = Costs(step_ms=Cost(BATCH_MS, "exponential"), **learner)
    return Simulator(
        num_workers=num_workers, num_steps=1, seed=7, batches_ahead=1, costs=costs, apply_at="batch"
    )


def check(taken, busy, service_ms, mean_lag):
    """Compare throughput and mean lag with the formulas.

    Services begin one after another, and intervals between them vary no more than exponential
    ones, so the error of a mean of n is 1 / sqrt(n) of it, and no more.
    """
    elapsed = (taken[-1].at_ms - taken[0].at_ms) / (len(taken) - 1)
    tolerance = 4 / math.sqrt(len(taken))
    assert 1 / elapsed == pytest.approx(busy / service_ms, rel=tolerance)
    # All batches that workers begin are taken: what the mean lag lacks is of the first and last.
    assert np.mean([one.lag for one in taken]) == pytest.approx(mean_lag, rel=tolerance)


@pytest.mark.parametrize(("num_workers", "load"), CLUSTERS)
def test_machine_repair(num_workers, load):
    # A worker is ordered its next batch when the last is taken, so all of the service is in that.
    service_ms = BATCH_MS * load / num_workers
    births = [(num_workers - k) / BATCH_MS for k in range(num_workers)]
    idle = birth_death(births, [1 / service_ms] * num_workers)[0]
    taken = drive(cluster(num_workers, take_ms=Cost(service_ms, "exponential")), BATCHES)
    # Between two batches of a worker, one of each other one is taken on average.
    check(taken, 1 - idle, service_ms, num_workers - 1)


@pytest.mark.parametrize(("num_workers", "load"), CLUSTERS)
def test_a_worker_goes_on_during_the_update_with_its_batch(num_workers, load):
    # The batch that is trained on is no worker's any more: up to N wait beside it.
    service_ms = BATCH_MS * load / num_workers
    births = [n / BATCH_MS for n in (num_workers, *range(num_workers, 0, -1))]
    idle = birth_death(births, [1 / service_ms] * (num_workers + 1))[0]
    taken = drive(cluster(num_workers, update_ms=Cost(service_ms, "exponential")), BATCHES)
    # And its own update comes between, too.
    check(taken, 1 - idle, service_ms, num_workers)
