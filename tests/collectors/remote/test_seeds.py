"""A worker draws the same random numbers wherever it runs."""

from __future__ import annotations

import gymnasium as gym
import pytest

from collectors import MultiSyncCollector
from tests.collectors.remote.support import KINDS, make
from tests.collectors.support import same_bits
from tests.promises.collector_probe import VersionPolicy


class Told(gym.ObservationWrapper):
    """Adds what the factory was told to each observation."""

    def __init__(self, worker_idx: int, seed: int):
        super().__init__(gym.make("CartPole-v1"))
        self.told = worker_idx + seed % 1000 / 1000

    def observation(self, observation):
        return observation + self.told


def make_told(worker_idx: int, seed: int) -> gym.Env:
    return Told(worker_idx, seed)


def drawn(batch):
    return batch.exclude("collector", ("next", "collector"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_node", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_workers_on_nodes_have_the_random_streams_of_local_ones(kind, per_node):
    options = {"frames_per_batch": 160, "seed": 3}
    nodes = {"num_collectors": 4 // per_node, "num_workers_per_collector": per_node}
    with (
        MultiSyncCollector([make_told] * 4, VersionPolicy(), **options) as local,
        make(kind, make_told, VersionPolicy(), **nodes, **options) as remote,
    ):
        assert same_bits(drawn(local.next()), drawn(remote.next()))
        assert local.set_seed(8) == remote.set_seed(8)
        assert same_bits(drawn(local.next()), drawn(remote.next()))
        local.set_seed(8, static_seed=True)
        remote.set_seed(8, static_seed=True)
        assert same_bits(drawn(local.next()), drawn(remote.next()))
