"""The statistics that observations are scaled by are there before the first version is."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import run
from harness.algorithms.ppo import PPO
from harness.environments.factory import EnvFactory, single
from harness.options import EnvConfig
from harness.run.build import sample_observations
from tests.harness.small import SMALL

FAR = EnvFactory(single(EnvConfig(id="MountainCar-v0")))  # positions about -0.5, speeds of 0.01


def test_a_seed_gives_the_same_observations_and_moves_no_global_random_stream():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first, second, other = (sample_observations(FAR, 300, seed=seed) for seed in (1, 1, 2))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert first.shape == (300, 2)
    assert before == after


@pytest.mark.parametrize("given", [("collector=single",), ("collector=multi_sync", "sync.lag=2")])
def test_the_first_batch_is_normalised_and_was_acted_upon_as_such(given, tmp_path, monkeypatch):
    seen, update = [], PPO.update

    def watched(ppo, batch, version):
        seen.append(ppo.policy.prepare(batch["observation"]).flatten(0, 1))
        result = update(ppo, batch, version)
        seen.append(ppo.ratios.log_ratio)
        return result

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PPO, "update", watched)
    given = (*given, "env.id=MountainCar-v0", "algo.normalise_observations=true")
    assert run.main([*SMALL, *given]) == 0
    inputs, log_ratio = seen[:2]
    assert inputs.mean(0).abs().max() < 2
    assert (inputs.std(0).log().abs() < 1.5).all()  # without statistics it is 0.05 and less
    torch.testing.assert_close(log_ratio, torch.zeros_like(log_ratio), rtol=0, atol=1e-5)
