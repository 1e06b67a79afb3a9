"""The options of collector=simulated: what they build, and which mistakes they name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collectors.simulation.costs import Cost, Stragglers
from collectors.simulation.network import Network
from collectors.simulation.simulated_pool import Failure
from harness.errors import ConfigError, ImpossiblePair
from harness.options.base import build
from harness.options.simulated import SimulatedConfig
from harness.options.sync import LinkConfig, SharedMemConfig
from sync import PRESETS
from tests.harness.config.composed import config_of


def run_with(sync=None, num_envs=8, **options):
    """A config as its checks see it."""
    collector = build(SimulatedConfig, options, "collector")
    return SimpleNamespace(
        collector=collector,
        sync=sync or SharedMemConfig(),
        env=SimpleNamespace(num_envs=num_envs),
        algo=SimpleNamespace(random_frames=0),
        seed=5,
    )


def simulator(**options):
    config = run_with(**options)
    config.collector.check(config)
    return config.collector.arguments(config)["schedule"]


def error_of(**options):
    with pytest.raises(ConfigError) as found:
        simulator(**options)
    return str(found.value)


def test_a_cost_is_a_number_or_a_distribution():
    costs = simulator(
        costs={
            "step_ms": 3,
            "policy_ms": {"kind": "gamma", "mean": 2, "cv": 0.5, "each": "batch"},
            "stragglers": {"share": 0.1, "factor": 4},
        }
    ).costs
    assert costs.step_ms == Cost(3.0)
    assert costs.policy_ms == Cost(2.0, "gamma", 0.5, "batch")
    assert costs.stragglers == Stragglers(0.1, 4.0)


def test_what_the_simulator_is_told():
    made = simulator(
        num_workers=3,
        frames_per_batch=256,
        batches_ahead=4,
        network={"port_mbps": 100, "topology": "tree", "fan_out": 3},
        failures=[{"worker": 2, "at_s": 1, "back_after_s": 0.5}],
        sync=SharedMemConfig(
            link=LinkConfig(preset="wan"),
            blocking=True,
            apply_at="batch",
            max_lag=7,
            on_stale="wait",
        ),
    )
    assert (made.num_workers, made.num_steps, made.seed) == (3, 32, 5)
    assert (made.batches_ahead, made.max_lag) == (4, 7)
    assert (made.blocking, made.apply_at) == (True, "batch")
    assert made.network == Network(100.0, "tree", 3)
    assert made.failures == [Failure(2, 1.0, 0.5)]
    assert made.link == PRESETS["wan"]
    assert simulator(sync=SharedMemConfig(max_lag=7)).max_lag is None
    assert simulator().link is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"costs": {"step_ms": -1}}, "collector.costs.step_ms=-1: expected a number (0"),
        ({"costs": {"step_ms": "slow"}}, "or a mapping of kind, mean, cv, each"),
        ({"costs": {"step_ms": {"kind": "gamma", "mean": 1}}}, "costs.step_ms.kind=gamma needs cv"),
        ({"costs": {"step_ms": {"kind": "gama"}}}, "did you mean gamma?"),
        ({"costs": {"step_ms": {"std": 1}}}, "collector.costs.step_ms.std=1: there is no such"),
        ({"costs": {"steps_ms": 1}}, "did you mean collector.costs.step_ms?"),
        ({"network": {"topology": "ring"}}, "expected one of star, tree"),
        ({"failures": [3]}, "a list, each a mapping of worker, at_s, back_after_s"),
        ({"failures": [{"worker": 1}]}, "collector.failures[0].at_s is not set"),
        (
            {"num_workers": 2, "failures": [{"worker": 2, "at_s": 0, "back_after_s": 0}]},
            "collector.failures: no worker 2, there are 2",
        ),
        ({"frames_per_batch": 100}, "the nearest that can is 96"),
        ({"num_workers": 5000}, "expected a whole number (1 to 4096)"),
        ({"devices": {"policy": ["cpu", "cpu"]}}, "name one device"),
    ],
)
def test_mistakes_are_named(options, words):
    assert words in error_of(**{"num_workers": 2, **options})


def test_a_tree_that_would_have_to_forward_each_worker_its_own_version_is_refused():
    lag = "sync.lag={kind: cycle, values: [0, 3], per: worker}"
    with pytest.raises(ConfigError, match=r"use collector\.network\.topology=star"):
        config_of("collector=simulated", lag, "collector.network.topology=tree")


@pytest.mark.parametrize("scheme", ["hogwild", "none"])
def test_weights_without_versions_cannot_be_simulated(scheme):
    with pytest.raises(ImpossiblePair, match="use sync=shared_mem"):
        config_of("collector=simulated", f"sync={scheme}")
