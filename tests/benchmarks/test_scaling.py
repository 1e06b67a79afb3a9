"""What the prediction for a cluster says about links, and what is fitted."""

from __future__ import annotations

import pytest

from benchmarks.scaling import (
    Cluster,
    Fit,
    Point,
    copies_from_the_trainer,
    copies_in_a_row,
    levels,
    predict,
    simulate,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["distributed", "rpc"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_the_trainer_sends_a_version_to_each_of_a_few_nodes(kind, nodes):
    assert copies_in_a_row(kind, nodes) == nodes
    assert copies_from_the_trainer(kind, nodes) == nodes


@pytest.mark.parametrize(("nodes", "deep", "in_a_row"), [(5, 2, 4), (20, 2, 8), (84, 3, 12)])
def test_nodes_of_distributed_pass_a_version_on_to_the_rest(nodes, deep, in_a_row):
    assert levels("distributed", nodes) == deep
    assert copies_in_a_row("distributed", nodes) == in_a_row
    assert copies_from_the_trainer("distributed", nodes) == 4


def test_over_rpc_the_trainer_sends_to_all_nodes():
    assert levels("rpc", 84) == 1
    assert copies_in_a_row("rpc", 84) == copies_from_the_trainer("rpc", 84) == 84


def test_rays_nodes_have_it_from_each_other():
    assert copies_in_a_row("ray", 127) == 7
    assert copies_from_the_trainer("ray", 127) == 1


def cost(workers):
    return 1.0 + 0.5 * workers + 2.0 * max(0, workers - 4)


def test_costs_are_found_again_and_hold_beyond_the_fit():
    points = [Point(n, cost(n), 0.0, 0.0, 0.0) for n in (1, 2, 4, 6, 8, 16)]
    fit = Fit.of(points, is_tree=True)
    assert (fit.fixed_ms, fit.each_ms, fit.relayed_ms) == pytest.approx((1.0, 0.5, 2.0))
    assert fit.error(points) < 1e-6
    assert fit.at(64) == pytest.approx(cost(64))


def test_no_cost_is_negative():
    times = {1: 3.0, 2: 2.5, 4: 2.0}
    fit = Fit.of([Point(n, ms, 0.0, 0.0, 0.0) for n, ms in times.items()], is_tree=True)
    assert min(fit.fixed_ms, fit.each_ms, fit.relayed_ms) >= 0.0


@pytest.mark.parametrize("kind", ["distributed", "ray"])
@pytest.mark.parametrize("gbit", [1, 100])
def test_the_simulator_brings_a_version_to_the_last_node_when_it_is_predicted(kind, gbit):
    fits = {kind: Fit(2.0, 0.5, 1.0, 0.0, is_tree=kind == "distributed")}
    on = Cluster(nodes=84, gbit=gbit)
    found = simulate(kind, fits, 4_000_000, on)
    expected = predict(kind, fits, 4_000_000, on)["total_ms"] - on.latency_ms * levels(kind, 84)
    assert found.latest_ms == pytest.approx(expected, rel=1e-3)
