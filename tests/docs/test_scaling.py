"""What the prediction for a cluster says about links, and what is fitted."""

from __future__ import annotations

import pytest

from docs.scaling import (
    Cluster,
    Fit,
    Point,
    copies_from_the_trainer,
    copies_in_a_row,
    predict,
    simulate,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["distributed", "rpc"])
def test_the_trainer_sends_a_version_to_each_worker(kind):
    on = Cluster(workers=84, hosts=21)
    assert copies_in_a_row(kind, on) == copies_from_the_trainer(kind, on) == 84


def test_rays_hosts_have_it_from_each_other():
    on = Cluster(workers=1016, hosts=127)
    assert copies_in_a_row("ray", on) == 7
    assert copies_from_the_trainer("ray", on) == 1


def cost(workers):
    return 1.0 + 0.5 * workers


def test_costs_are_found_again_and_hold_beyond_the_fit():
    points = [Point(n, cost(n), 0.0, 0.0, 0.0) for n in (1, 2, 4, 6, 8, 16)]
    fit = Fit.of(points)
    assert (fit.fixed_ms, fit.each_ms) == pytest.approx((1.0, 0.5))
    assert fit.error(points) < 1e-6
    assert fit.at(64) == pytest.approx(cost(64))


@pytest.mark.parametrize("times", [{1: 3.0, 2: 2.5, 4: 2.0}, {1: 0.5, 2: 1.5, 4: 4.5}])
def test_no_cost_is_negative(times):
    fit = Fit.of([Point(n, ms, 0.0, 0.0, 0.0) for n, ms in times.items()])
    assert min(fit.fixed_ms, fit.each_ms) == 0.0
    assert max(fit.fixed_ms, fit.each_ms) > 0.0


@pytest.mark.parametrize("kind", ["distributed", "ray"])
@pytest.mark.parametrize("gbit", [1, 100])
def test_the_simulator_brings_a_version_to_the_last_worker_when_it_is_predicted(kind, gbit):
    fit, on = Fit(2.0, 0.5, 0.0), Cluster(workers=84, hosts=21, gbit=gbit)
    simulated = simulate(kind, fit, 4_000_000, on)
    expected = predict(kind, fit, 4_000_000, on).total_ms - on.latency_ms
    assert simulated.latest_ms == pytest.approx(expected, rel=1e-3)
