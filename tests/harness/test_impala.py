"""IMPALA's losses by hand, what it learns from, and that it learns."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor

from harness.algorithms.impala import IMPALA, IMPALAConfig
from harness.algorithms.interface import Setup
from harness.models.encoders import CNNConfig, LSTMConfig, MLPConfig
from harness.options import ModelConfig
from harness.options.base import build
from tests.harness.actor_critics import DISCRETE, MODELS, VECTOR, rollout, same
from tests.harness.actor_critics import impala as learner
from tests.harness.rollouts import PlainCollector


@pytest.fixture(autouse=True)
def _seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


# -- the loss


def vtrace_by_definition(
    values: list[float],
    rewards: list[float],
    ratios: list[float],
    bootstrap: float,
    config: IMPALAConfig,
) -> list[float]:
    """Targets of one trajectory by the sum of products in the paper, not by a recursion."""
    gamma, following = config.gamma, [*values[1:], bootstrap]
    targets = []
    for s in range(len(values)):
        target = values[s]
        for t in range(s, len(values)):
            error = rewards[t] + gamma * following[t] - values[t]
            traces = math.prod(min(config.c_bar, ratio) for ratio in ratios[s:t])
            target += gamma ** (t - s) * traces * min(config.rho_bar, ratios[t]) * error
        targets.append(target)
    return targets


def episodes(batch: TensorDict) -> list[tuple[int, list[int]]]:
    """Row and columns of each piece of a trajectory in a batch."""
    found: list[tuple[int, list[int]]] = []
    for row, ids in enumerate(batch["collector", "traj_ids"].tolist()):
        for number in dict.fromkeys(ids):
            found.append((row, [t for t, traj_id in enumerate(ids) if traj_id == number]))
    return found


CAPS = [
    {},
    {"rho_bar": 1.5, "c_bar": 0.9, "pg_rho_bar": 2.0},
    {"rho_bar": 0.7, "pg_rho_bar": 0.5, "gamma": 0.8, "entropy_weight": 0.3, "value_weight": 2.0},
]


@pytest.mark.parametrize("caps", CAPS)
def test_the_losses_and_their_gradient_are_those_of_the_paper(caps):
    # No clipping, and a tolerance of RMSProp so large that a step is the gradient itself.
    exact = {"max_grad_norm": 0.0, "rmsprop_eps": 1e6, "anneal_learning_rate": False}
    impala = learner(**caps, **exact, learning_rate=1e6)
    with torch.no_grad():  # where all actions are equally likely, entropy has no gradient
        impala.policy.head.logits.bias.copy_(torch.tensor([1.5, 0.0, -1.0]))
    config, batch = impala.config, rollout(impala)
    assert batch["next", "truncated"].any()
    assert batch["next", "terminated"].any()
    batch["action_log_prob"] += 0.7 * torch.randn(batch.shape)  # as if older weights had acted

    policy, critic = impala.policy, impala.critic
    parameters = policy.head(policy.encoder(batch["observation"]))
    log_prob = policy.head.log_prob(parameters, batch["action"])
    entropy = policy.head.entropy(parameters).mean()
    value = critic(batch["observation"], torch.empty(0))
    following = critic(batch["next", "observation"], torch.empty(0)).detach()
    ratio = (log_prob - batch["action_log_prob"]).exp().detach()

    policy_loss = value_loss = torch.zeros(())
    for row, columns in episodes(batch):
        end = columns[-1]
        terminated = bool(batch["next", "terminated"][row, end])
        bootstrap = 0.0 if terminated else float(following[row, end])
        rewards = batch["next", "reward"][row, columns].tolist()
        values, ratios = value[row, columns].tolist(), ratio[row, columns].tolist()
        targets = vtrace_by_definition(values, rewards, ratios, bootstrap, config)
        for t, column in enumerate(columns):
            after = [*targets, bootstrap][t + 1]
            advantage = rewards[t] + config.gamma * after - values[t]
            weight = min(config.pg_rho_bar, ratios[t])
            policy_loss = policy_loss - weight * advantage * log_prob[row, column]
            value_loss = value_loss + 0.5 * (value[row, column] - targets[t]).square()
    policy_loss, value_loss = policy_loss / batch.numel(), value_loss / batch.numel()
    loss = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy
    gradients = torch.autograd.grad(loss, impala.optimiser.parameters)
    norm = torch.cat([g.flatten() for g in gradients]).norm()

    before = [parameter.detach().clone() for parameter in impala.optimiser.parameters]
    metrics = impala.update(batch, 0)
    for was, now, gradient in zip(before, impala.optimiser.parameters, gradients, strict=True):
        torch.testing.assert_close(was - now.detach(), gradient, rtol=1e-4, atol=1e-6)
    expected = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    for name, wanted in {**expected, "grad_norm": norm}.items():
        assert metrics[f"train/{name}"] == pytest.approx(wanted.item(), rel=1e-4)


def test_rewards_are_clipped_for_the_learner_alone():
    impala, clipped = learner(), learner(clip_rewards=True)
    batch = rollout(impala)
    batch["next", "reward"] *= 10
    recorded = batch["next", "reward"].clone()
    cut = batch.clone()
    cut["next", "reward"].clamp_(-1, 1)
    assert clipped.update(batch, 0) == impala.update(cut, 0)
    assert same(impala, clipped)
    assert torch.equal(batch["next", "reward"], recorded)


def test_frames_that_the_policy_has_become_unlikely_to_act_in_weigh_little():
    impala, other = learner(), learner()
    batch = rollout(impala)
    batch["action_log_prob"][:] = 100.0
    metrics = impala.update(batch, 0)
    assert metrics["train/policy_loss"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["train/value_loss"] == pytest.approx(0.0, abs=1e-9)
    assert other.update(rollout(other), 0)["train/value_loss"] > 0.01


# -- the networks and what they are given


def test_gradients_go_back_through_so_many_frames_of_a_memory():
    def after_update(length: int) -> IMPALA:
        model = LSTMConfig(hidden_sizes=[8], lstm_size=6, sequence_length=length)
        impala = IMPALA(IMPALAConfig(), Setup(VECTOR, DISCRETE, model, total_frames=1000))
        impala.update(rollout(impala, "lstm"), 0)
        return impala

    torch.manual_seed(1)
    whole = after_update(21)
    torch.manual_seed(1)
    longer = after_update(100)
    torch.manual_seed(1)
    short = after_update(3)
    assert same(whole, longer)
    assert not same(whole, short)


# -- data that lags


def test_a_dropped_frame_has_no_part_in_the_loss():
    """Beyond what its reward and value say of earlier frames."""
    impala, other = learner(max_lag=2), learner(max_lag=2)
    batch = rollout(impala)
    batch["policy_version"][:] = 8
    batch["policy_version"][:, :5] = 0  # the first frames of each row: no frame is before them
    changed = batch.clone()
    changed["next", "reward"][:, :5] += 3.0
    first, second = impala.update(batch, 10), other.update(changed, 10)
    assert first["train/policy_loss"] == second["train/policy_loss"]
    assert same(impala, other)


# -- the course of an update


def test_each_epoch_is_a_gradient_step():
    batch = rollout(learner())
    assert learner().update(batch, 0)["train/gradient_steps"] == 1
    once, twice = learner(), learner(epochs=2)
    assert twice.update(batch, 0)["train/gradient_steps"] == 2
    for _ in range(2):
        once.frames = 0  # at the same learning rate
        once.update(batch, 0)
    assert same(once, twice)


# -- what is refused


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"optimiser": "sgd"}, "algo.optimiser=sgd: expected .*rmsprop, adam"),
        ({"learning_rate": 0.0}, "algo.learning_rate=0.0: expected .*more than 0"),
        ({"rmsprop_alpha": 1.5}, "algo.rmsprop_alpha=1.5: expected .*0 to 1"),
        ({"rmsprop_eps": 0.0}, "algo.rmsprop_eps=0.0: "),
        ({"rmsprop_momentum": -0.1}, "algo.rmsprop_momentum=-0.1: "),
        ({"gamma": 1.5}, "algo.gamma=1.5: expected .*0 to 1"),
        ({"epochs": 0}, "algo.epochs=0: expected .*1 or more"),
        ({"rho_bar": 0.0}, "algo.rho_bar=0.0: "),
        ({"c_bar": -1.0}, "algo.c_bar=-1.0: "),
        ({"pg_rho_bar": float("nan")}, "algo.pg_rho_bar=nan: "),
        ({"max_lag": -1}, "algo.max_lag=-1: expected .*0 or more"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        build(IMPALAConfig, change, "algo")


# -- it learns


class Told(gym.Env[Any, Any]):
    """Four steps; the first observation tells what the last action should be.

    see: "always" or "once", whether later observations tell it, too; "image", always, as an image.
    """

    def __init__(self, see: str, action_space: gym.Space[Any]):
        self.see, self.action_space = see, action_space
        self.observation_space = VECTOR if see != "image" else MODELS["cnn"][1]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.wanted = 0, int(self.np_random.integers(2))
        return self._observe(), {}

    def _observe(self) -> Any:
        if self.see == "image":
            return np.full((36, 36, 1), 255 * self.wanted, np.uint8)
        tells = self.see == "always" or self.steps == 0
        return np.array([2 * self.wanted - 1 if tells else 0, self.steps == 3, 0.5], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps < 4:
            return self._observe(), 0.0, False, False, {}
        is_box = isinstance(self.action_space, Box)
        reward = -abs(float(action[0]) - self.wanted) if is_box else float(action == self.wanted)
        return self._observe(), reward, True, False, {}


def last_return(
    see: str, model: ModelConfig, action_space: gym.Space[Any], updates: int, **config: Any
) -> float:
    """The mean return of the most likely actions after training on data two updates old."""
    make = partial(Told, see, action_space)
    envs = SyncVectorEnv([make] * 16, autoreset_mode=AutoresetMode.SAME_STEP)
    collector = PlainCollector(envs)
    config = {"optimiser": "adam", "learning_rate": 1e-2, "anneal_learning_rate": False, **config}
    impala = IMPALA(IMPALAConfig(**config), Setup(*collector.spaces, model))
    waiting: list[TensorDict] = []
    for version in range(updates):
        waiting.append(collector.collect(impala.policy, 8, version))
        if len(waiting) > 2:
            impala.update(waiting.pop(0), version)
    return float(np.mean(played(impala, make)))


def played(impala: IMPALA, make: Any, num_episodes: int = 20) -> list[float]:
    returns = []
    env = make()
    for episode in range(num_episodes):
        observation, _ = env.reset(seed=episode)
        state: dict[str, Tensor] = impala.policy.initial_state(1)
        total, done = 0.0, False
        while not done:
            with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
                inputs = torch.as_tensor(observation).unsqueeze(0)
                action, _, *after = impala.policy(inputs, *state.values())
            state = dict(zip(state, after, strict=True))
            observation, reward, done, _, _ = env.step(action[0].numpy())
            total += float(reward)
        returns.append(total)
    return returns


@pytest.mark.parametrize("optimiser", ["rmsprop", "adam"])
def test_it_learns_to_do_what_it_is_told(optimiser):
    found = last_return(
        "always", MLPConfig(hidden_sizes=[16]), Discrete(2), 50, optimiser=optimiser
    )
    assert found == 1.0


def test_it_learns_to_remember_what_it_was_told():
    model = LSTMConfig(hidden_sizes=[16], lstm_size=16, sequence_length=8)
    assert last_return("once", model, Discrete(2), 150) == 1.0


def test_it_learns_from_images():
    model = CNNConfig(hidden_sizes=[16])
    assert last_return("image", model, Discrete(2), 60, learning_rate=3e-3) == 1.0


def test_it_learns_continuous_actions():
    box = Box(-2, 2, (1,), np.float32)
    assert last_return("always", MLPConfig(hidden_sizes=[16]), box, 100) > -0.3
