"""Do the algorithms learn? With a plain loop, so that nothing but them is in question."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from harness.algorithms.interface import Setup
from harness.algorithms.ppo import PPO, PPOConfig
from harness.algorithms.sac import SAC, SACConfig
from harness.environments.evaluate import Evaluator
from harness.environments.factory import EnvFactory, single
from harness.models.encoders import LSTMConfig, MLPConfig
from harness.options import EnvConfig, ModelConfig
from tests.harness.rollouts import known

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


def ppo_returns(total: int, model: ModelConfig, delay: int = 0, **config: Any) -> float:
    """Train on CartPole, on batches `delay` updates old; then play."""
    collector = known("CartPole-v1", num_envs=8)
    ppo = PPO(PPOConfig(**config), Setup(*collector.spaces, model, total_frames=total))
    waiting: list[TensorDict] = []
    for version in range(total // 256):
        waiting.append(collector.collect(ppo.policy, 32, version))
        if len(waiting) > delay:
            ppo.update(waiting.pop(0), version)
    return Evaluator(EnvFactory(single(EnvConfig())), episodes=10).run(ppo.policy)["eval/return"]


FAST: dict[str, Any] = {
    "learning_rate": 1e-3,
    "epochs": 10,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "entropy_weight": 0.0,
    "minibatch_size": 64,
    "clip_value": False,
}


def test_ppo_solves_cartpole():
    assert ppo_returns(60_000, MLPConfig(), **FAST) >= 475


def test_ppo_with_normalisation_solves_cartpole():
    scaled = {"normalise_observations": True, "normalise_rewards": True}
    assert ppo_returns(60_000, MLPConfig(), **FAST, **scaled) >= 400


def test_ppo_with_a_memory_learns_cartpole():
    model = LSTMConfig(hidden_sizes=[32], lstm_size=32)
    assert ppo_returns(30_000, model, **{**FAST, "epochs": 5}) >= 100


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"objective": "decoupled"},
        {"objective": "decoupled", "vtrace": True},
        {"objective": "ewma"},
        {"objective": "dual_clip"},
        {"objective": "m2po"},
        {"objective": "truncated_is"},
        {"objective": "cispo", "epochs": 2},
        {"objective": "vtrace", "vtrace": True, "epochs": 4},
    ],
    ids=str,
)
def test_ppo_learns_cartpole_from_data_that_lags(config):
    assert ppo_returns(60_000, MLPConfig(), delay=4, **{**FAST, **config}) >= 200


def test_sac_improves_at_pendulum():
    collector = known("Pendulum-v1", num_envs=1)
    model = MLPConfig(hidden_sizes=[64, 64], activation="relu")
    sac = SAC(SACConfig(batch_size=128), Setup(*collector.spaces, model))
    generator = torch.Generator().manual_seed(0)
    total = 5000
    store = collector.collect(sac.policy, 1).flatten().expand(total).clone()
    for i in range(total):
        store[i] = collector.collect(sac.policy, 1).flatten()[0]
        if i >= 500:
            drawn = torch.randint(i + 1, (128,), generator=generator)
            sac.update(store[drawn])
    result = Evaluator(EnvFactory(single(EnvConfig(id="Pendulum-v1"))), episodes=5).run(sac.policy)
    assert result["eval/return"] >= -400
    assert np.mean(collector.finished[:3]) < -800
