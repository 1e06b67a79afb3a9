"""Costs: means and spreads are as they are named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from collectors.simulation.costs import Cost, Costs, LearnerTimes, StepTimes, Stragglers

COUNT = 40_000


@pytest.mark.parametrize(
    "cost",
    [
        Cost(5.0),
        Cost(5.0, "uniform", 0.5),
        Cost(5.0, "normal", 0.2),
        Cost(5.0, "lognormal", 1.5),
        Cost(5.0, "exponential"),
        Cost(5.0, "gamma", 0.7),
        Cost(5.0, "gamma", 0.0),
        Cost(5.0, "constant", 0.0),
        Cost(0.0, "lognormal", 1.0),
    ],
)
def test_draws_have_the_mean_and_the_spread(cost):
    drawn = cost.draw(np.random.default_rng(0), COUNT)
    cv = 1.0 if cost.kind == "exponential" else cost.cv or 0.0
    error = cv * cost.mean / math.sqrt(COUNT)
    assert drawn.mean() == pytest.approx(cost.mean, abs=4 * error + 1e-12)
    assert drawn.std() == pytest.approx(cv * cost.mean, rel=0.1)
    assert drawn.min() >= 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mean": -1.0}, "mean"),
        ({"mean": math.nan}, "mean"),
        ({"kind": "pareto"}, "kind='pareto'"),
        ({"each": "run"}, "each='run'"),
        ({"kind": "gamma"}, "needs cv"),
        ({"kind": "constant", "cv": 0.5}, "leave cv out"),
        ({"kind": "constant", "cv": 1.0}, "leave cv out"),
        ({"kind": "exponential", "cv": 0.5}, "leave cv out"),
        ({"kind": "uniform", "cv": 0.6}, "kind=gamma takes more"),
        ({"kind": "normal", "cv": 0.6}, "kind=gamma takes more"),
    ],
)
def test_impossible_costs_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        Cost(**options)


def steps(worker=0, seed=0, factor=1.0, **costs):
    times = StepTimes(Costs(**costs), 100, seed, worker, factor)
    return np.array([np.diff([0, *times.draw()]) / 1e6 for _ in range(200)])


def test_a_step_is_a_policy_call_and_a_step_of_the_environments():
    assert steps(step_ms=Cost(2), policy_ms=Cost(1)) == pytest.approx(3.0)
    assert steps(step_ms=Cost(2), policy_ms=Cost(1), factor=2.5) == pytest.approx(7.5)


def test_a_cost_is_drawn_for_each_step_or_for_each_batch():
    each_step = steps(step_ms=Cost(2, "gamma", 0.5))
    assert each_step.std(axis=1).mean() == pytest.approx(1.0, rel=0.1)
    each_batch = steps(step_ms=Cost(2, "gamma", 0.5, "batch"))
    assert each_batch.std(axis=1) == pytest.approx(0, abs=1e-5)
    assert each_batch.mean(axis=1).std() == pytest.approx(1.0, rel=0.2)


def test_workers_and_costs_have_streams_of_their_own():
    cost = Cost(2, "gamma", 0.5)
    assert (steps(step_ms=cost) == steps(step_ms=cost)).all()
    assert (steps(step_ms=cost) != steps(step_ms=cost, worker=1)).any()
    assert (steps(step_ms=cost) != steps(step_ms=cost, seed=1)).any()
    assert (steps(step_ms=cost) != steps(policy_ms=cost)).any()
    alone = LearnerTimes(Costs(take_ms=cost, update_ms=cost), 0)
    expected = [alone.draw("update_ms") for _ in range(5)]
    beside = LearnerTimes(Costs(take_ms=cost, update_ms=cost), 0)
    assert [(beside.draw("take_ms"), beside.draw("update_ms"))[1] for _ in range(5)] == expected


def test_the_last_workers_are_slower():
    stragglers = Stragglers(0.3, 2.0)
    assert [stragglers.factor_of(worker, 4) for worker in range(4)] == [1, 1, 2, 2]
    assert {Stragglers().factor_of(worker, 4) for worker in range(4)} == {1.0}
    with pytest.raises(ValueError, match="share"):
        Stragglers(1.5)
    with pytest.raises(ValueError, match="factor"):
        Stragglers(0.5, 0.0)
    with pytest.raises(ValueError, match="factor"):
        Stragglers(0.5, math.inf)
