from __future__ import annotations

import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict.nn import InteractionType, interaction_type, set_interaction_type
from torch import nn

from collectors.rollout.seeds import Seeds
from harness.algorithms.dqn import DQN, DQNConfig
from harness.algorithms.interface import Setup
from harness.algorithms.ppo import PPO, PPOConfig
from harness.algorithms.sac import SAC, SACConfig
from harness.environments.evaluate import Evaluator
from harness.environments.factory import EnvFactory, single
from harness.models.encoders import LSTMConfig, MLPConfig
from harness.options import EnvConfig


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
        self.modes = []

    def forward(self, observation):
        self.sizes.append(len(observation))
        self.modes.append(interaction_type())
        torch.rand(1)
        return torch.ones(len(observation), dtype=torch.int64)


def test_every_episode_counts_once_and_the_figures_are_theirs(counting):
    policy = Always()
    result = Evaluator(EnvFactory(single(counting)), episodes=3, seed=2).run(
        policy
    )  # lengths 2, 3 and 4
    assert result["eval/return"] == result["eval/return_sampled"] == result["eval/length"] == 3.0
    assert result["eval/return_std"] == pytest.approx(np.std([2, 3, 4]))
    assert policy.sizes == [3, 3, 2, 1] * 2  # finished environments are left alone
    greedy, sampled = policy.modes[:4], policy.modes[4:]
    assert {*greedy} == {InteractionType.DETERMINISTIC}
    assert {*sampled} == {InteractionType.RANDOM}
    assert "eval/entropy" not in result  # this policy does not tell it


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


def policy_of(kind):
    """A learner's policy, and the spaces that it is made for."""
    observations, discrete = Box(-1, 1, (4,), np.float32), Discrete(3)
    continuous = Box(-2, 2, (2,), np.float32)
    model = LSTMConfig(hidden_sizes=[8]) if kind == "lstm" else MLPConfig(hidden_sizes=[8])
    match kind:
        case "dqn":
            return DQN(DQNConfig(epsilon_start=0.3), Setup(observations, discrete, model)).policy
        case "sac":
            return SAC(SACConfig(), Setup(observations, continuous, model)).policy
        case "gaussian":
            return PPO(PPOConfig(), Setup(observations, continuous, model)).policy
    return PPO(PPOConfig(), Setup(observations, discrete, model)).policy


@pytest.mark.parametrize("kind", ["mlp", "lstm", "gaussian", "sac", "dqn"])
def test_the_entropy_of_a_policy_is_that_of_the_actions_it_draws(kind):
    policy = policy_of(kind)
    count = 100_000
    torch.manual_seed(7)
    seen = torch.randn(1, 4).expand(count, 4)
    state = [policy.initial_state(count)["state"]] if kind == "lstm" else []
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        outputs = policy(seen, *state)
        entropy = float(policy.entropy(seen, *state).mean())
    actions = outputs[0] if isinstance(outputs, tuple) else outputs
    if kind in ("mlp", "lstm", "dqn"):
        shares = torch.bincount(actions) / count
        expected = float(torch.special.entr(shares).sum())
    elif kind == "gaussian":
        expected = float(-outputs[1].mean())
    else:  # of a squashed Gaussian, by a histogram of each action
        expected = 0.0
        for one in actions.T:
            density, edges = np.histogram(one.numpy(), bins=400, range=(-2, 2), density=True)
            filled = density[density > 0]
            expected -= float((filled * np.log(filled)).sum() * (edges[1] - edges[0]))
    assert entropy == pytest.approx(expected, abs=0.03)


def test_sampled_actions_are_drawn_from_a_stream_that_no_training_uses():
    streams = []
    for seeding in (Seeds(1).seed_streams, Seeds(1).seed_evaluation):
        seeding()
        streams.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert not {*streams[0]} & {*streams[1]}


class ByChoice(Counting):
    """Has three actions of 32 bits; the reward of an action is its number."""

    action_space = Discrete(3, dtype=np.int32)

    def step(self, action):
        assert self.action_space.contains(action)
        return super().step(action)


def test_greedy_and_sampled_returns_are_of_the_same_episodes():
    class Leaning(nn.Module):
        """Chooses 2; when it samples, any action alike."""

        def forward(self, observation):
            if interaction_type() == InteractionType.RANDOM:
                return torch.randint(3, (len(observation),))
            return torch.full((len(observation),), 2)

        def entropy(self, observation):
            return torch.full((len(observation),), 1.5)

    result = Evaluator(ByChoice, episodes=5, seed=5).run(Leaning())  # lengths 5 to 9
    assert result["eval/return"] == 2 * 7
    assert 0 < result["eval/return_sampled"] < 2 * 7
    assert result["eval/entropy"] == 1.5


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
