"""envpool comes through the same door as every vector environment."""

from __future__ import annotations

import pytest
import torch

from collectors import Collector, MultiSyncCollector

envpool = pytest.importorskip("envpool", reason="envpool is not installed: pip install envpool")


def make_pool():
    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=8, seed=5)


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
