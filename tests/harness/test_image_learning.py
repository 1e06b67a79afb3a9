"""PPO learns from images with every model for them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from harness.algorithms.interface import Setup
from harness.algorithms.ppo import PPO, PPOConfig
from harness.registry import models
from tests.harness.rollouts import PlainCollector


@pytest.fixture(autouse=True)
def one_thread():
    """The same numbers whatever the machine, and no threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


class Lit(gym.Env):
    """One channel of an image is lit: its number is the action that is rewarded."""

    action_space = Discrete(2)

    def __init__(self, side: int, dtype: type):
        self.observation_space = Box(0, 255 if dtype is np.uint8 else 1, (side, side, 2), dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        reward = float(action == self.lit)
        return self._observe(), reward, bool(self.np_random.random() < 0.2), False, {}

    def _observe(self):
        self.lit = int(self.np_random.integers(2))
        image = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        image[..., self.lit] = self.observation_space.high.max()
        return image


@pytest.mark.parametrize(
    ("name", "side", "dtype"),
    [
        ("cnn", 36, np.uint8),
        ("impala_cnn", 10, np.uint8),
        ("minatar_cnn", 10, np.bool_),
        ("minatar_cnn", 10, np.float32),
        ("cnn_lstm", 36, np.uint8),
        ("impala_cnn_lstm", 10, np.uint8),
        ("minatar_cnn_lstm", 10, np.bool_),
    ],
)
def test_ppo_learns_from_images(name, side, dtype):
    envs = [lambda: Lit(side, dtype)] * 8
    collector = PlainCollector(SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP))
    config = PPOConfig(learning_rate=1e-3, minibatch_size=64, anneal_learning_rate=False)
    model = models.get(name).options(hidden_sizes=[32])
    ppo = PPO(config, Setup(*collector.spaces, model=model))
    for version in range(15):
        batch = collector.collect(ppo.policy, 16, version)
        ppo.update(batch, version)
        if batch["next", "reward"].mean() > 0.9:
            return
    pytest.fail(f"mean reward {batch['next', 'reward'].mean():g} after 15 updates")
