"""envpool comes through the same door as every vector environment."""

from __future__ import annotations

import pytest
import torch

from collectors import Collector, MultiSyncCollector

envpool = pytest.importorskip("envpool", reason="envpool is not installed: pip install envpool")


def make_pool():
    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=8, seed=5)


def start(seed):
    def make(seed):
        return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=seed)

    with MultiSyncCollector(make, None, num_workers=2, frames_per_batch=80, seed=seed) as collector:
        return collector.next()["observation"][:, 0]


def test_pools_that_take_a_seed_differ_between_workers_and_come_again_with_the_same_seed():
    first = start(3)
    assert len(first.unique(dim=0)) == 8
    assert torch.equal(start(3), first)
    assert not torch.equal(start(4), first)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_pools_are_stepped_and_their_resets_are_no_frames(kind):
    with kind(make_pool, frames_per_batch=320) as collector:
        for _ in range(4):
            batch = collector.next()
            mask = batch["collector", "mask"]
            assert batch.batch_size == torch.Size([8, 40])
            assert not mask.all()  # random actions end episodes, and resets take a step each
            assert (batch["next", "reward"][mask] == 1).all()
            ended = batch["next", "done"] & mask
            assert (batch["next", "observation"][ended][:, 2].abs() > 0.2).all()
            starts = batch["is_init"] & mask
            assert (batch["observation"][starts].abs() <= 0.05).all()
