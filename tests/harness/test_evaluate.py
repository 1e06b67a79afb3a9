from __future__ import annotations

import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict.nn import InteractionType, interaction_type
from torch import nn

from harness.algorithms.interface import Setup
from harness.algorithms.ppo import PPO
from harness.environments.evaluate import Evaluator
from harness.environments.factory import EnvFactory, single
from harness.options import EnvConfig, LSTMConfig, MLPConfig, PPOConfig


class Counting(gym.Env):
    """Shows how many steps are done; ends after as many as its seed says, with reward 1 each."""

    observation_space = Box(0, 100, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.done = seed % 10, 0
        random.random(), np.random.rand(), torch.rand(1)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.left > 0, "stepped after its end"
        self.left, self.done = self.left - 1, self.done + 1
        return np.full(1, self.done, np.float32), float(action), self.left == 0, False, {}


@pytest.fixture
def counting():
    gym.register("Counting-v0", Counting)
    yield EnvConfig(id="Counting-v0")
    del gym.registry["Counting-v0"]


class Always(nn.Module):
    """Chooses 1; looks at what it is given."""

    def __init__(self):
        super().__init__()
        self.sizes = []
        self.modes = set()

    def forward(self, observation):
        self.sizes.append(len(observation))
        self.modes.add(interaction_type())
        torch.rand(1)
        return torch.ones(len(observation), dtype=torch.int64)


def test_every_episode_counts_once_and_the_figures_are_theirs(counting):
    policy = Always()
    result = Evaluator(EnvFactory(single(counting)), episodes=3, seed=2).run(
        policy
    )  # lengths 2, 3 and 4
    assert result["eval/return"] == result["eval/length"] == 3.0
    assert result["eval/return_std"] == pytest.approx(np.std([2, 3, 4]))
    assert policy.sizes == [3, 3, 2, 1]  # finished environments are left alone
    assert policy.modes == {InteractionType.DETERMINISTIC}


def test_an_episode_without_an_end_is_cut_and_named(counting, caplog):
    result = Evaluator(EnvFactory(single(counting)), episodes=3, seed=2, max_steps=3).run(Always())
    assert result["eval/return"] == pytest.approx((2 + 3 + 3) / 3)
    assert "1 of 3 episodes had not ended after evaluation.max_steps=3" in caplog.text


def test_the_same_policy_gets_the_same_result_each_time(counting):
    evaluator = Evaluator(EnvFactory(single(counting)), episodes=4, seed=1)
    assert evaluator.run(Always()) == evaluator.run(Always())
    evaluator.close()


def test_no_global_random_stream_is_moved(counting):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    Evaluator(EnvFactory(single(counting)), episodes=2, seed=1).run(Always())
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before


@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_a_learners_policy_is_played_deterministically_and_left_as_it_was(model):
    config = EnvConfig(num_envs=8, vectorisation="native", max_episode_steps=20)
    space = Box(-1, 1, (4,), np.float32)
    algo = PPOConfig(normalise_observations=True)
    network = {"mlp": MLPConfig, "lstm": LSTMConfig}[model](hidden_sizes=[8])
    policy = PPO(algo, Setup(space, Discrete(2), network, total_frames=1000)).policy
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    evaluator = Evaluator(EnvFactory(single(config)), episodes=3, seed=5)
    assert evaluator.run(policy) == evaluator.run(policy)
    for name, value in policy.state_dict().items():
        assert torch.equal(value, before[name])
    evaluator.close()


def test_no_episodes_are_refused():
    with pytest.raises(ValueError, match="episodes is 0, expected 1 or more"):
        Evaluator(EnvFactory(single(EnvConfig())), episodes=0)


class Drawn(Counting):
    """Draws the length of its episodes when it is made; gives rewards as arrays of one number."""

    def __init__(self):
        self.length = 1 + int(torch.randint(50, ())) + np.random.randint(50) + random.randrange(50)

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        self.left = self.length
        return observation, info

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward]), *rest


def test_what_environments_draw_when_they_are_made_is_the_same_for_every_run():
    found = []
    for outside in (1, 2):
        torch.manual_seed(outside), np.random.seed(outside), random.seed(outside)
        found.append(Evaluator(Drawn, episodes=3, seed=1).run(Always()))
    assert found[0] == found[1]
    assert found[0]["eval/return"] == found[0]["eval/length"]  # a reward of one element counts
