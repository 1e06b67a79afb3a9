"""IMPALA's losses by hand, what it learns from, and that it learns."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor

from collectors import Collector
from harness.algorithms.impala import IMPALA
from harness.algorithms.interface import Setup
from harness.options import CNNConfig, IMPALAConfig, LSTMConfig, MLPConfig, ModelConfig
from harness.options.typed import build
from tests.harness.rollouts import Noise, PlainCollector, noise

VECTOR = Box(-1, 1, (3,), np.float32)
DISCRETE = Discrete(3)
MODELS = {
    "mlp": (MLPConfig(hidden_sizes=[8]), VECTOR),
    "lstm": (LSTMConfig(hidden_sizes=[8], lstm_size=6, sequence_length=4), VECTOR),
    "cnn": (CNNConfig(hidden_sizes=[8]), Box(0, 255, (36, 36, 1), np.uint8)),
}
ACTIONS = {
    "discrete": DISCRETE,
    "several": MultiDiscrete([2, 3]),
    "box": Box(-1, 1, (2,), np.float32),
}


@pytest.fixture(autouse=True)
def _seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


def learner(model: str = "mlp", actions: str = "discrete", *, total: int = 10_000, **config: Any):
    config = {"learning_rate": 1e-2, **config}
    network, observations = MODELS[model]
    return IMPALA(
        IMPALAConfig(**config), Setup(observations, ACTIONS[actions], network, total_frames=total)
    )


def rollout(
    impala: IMPALA, model: str = "mlp", actions: str = "discrete", steps: int = 21
) -> TensorDict:
    return noise(MODELS[model][1], ACTIONS[actions]).collect(impala.policy, steps)


def weights_of(impala: IMPALA) -> dict[str, Any]:
    state = impala.state_dict()
    seen = {key: torch.as_tensor(value) for key, value in state.get("statistics", {}).items()}
    return {**state["policy"], **state["critic"], **seen}


def same(first: IMPALA, second: IMPALA) -> bool:
    pairs = zip(weights_of(first).values(), weights_of(second).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


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
    impala = learner(**caps)
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

    metrics = impala.update(batch, 0)
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


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize(
    ("model", "normalise"),
    [("mlp", False), ("mlp", True), ("lstm", False), ("lstm", True), ("cnn", False)],
)
def test_it_sees_what_the_workers_saw(model, actions, normalise):
    # A small step: with large weights, rows computed together and alone differ by more rounding on
    # some processors.
    config = {"learning_rate": 1e-3, "normalise_observations": normalise}
    impala = learner(model, actions, **config)
    before = copy.deepcopy(impala.policy.state_dict())
    impala.update(rollout(impala, model, actions), 0)
    assert not all(torch.equal(before[k], v) for k, v in impala.policy.state_dict().items())
    impala.update(rollout(impala, model, actions), 1)
    assert impala.ratios is not None
    assert impala.ratios.log_ratio.shape == (63,)
    zeros = torch.zeros(63)
    torch.testing.assert_close(impala.ratios.log_ratio, zeros, rtol=1e-4, atol=1e-5)


def test_a_state_that_new_weights_zeroed_is_zero_to_the_learner_too():
    impala = learner("lstm")
    batches = []
    with Collector(
        partial(Noise, VECTOR, DISCRETE), impala.policy, frames_per_batch=6, state_on_update="zero"
    ) as collector:
        for _ in range(8):
            batches.append(collector.next())
            collector.update_policy_weights_()
    batch = torch.cat(batches, 1)
    assert (~batch["state"].any(-1) & ~batch["is_init"]).any()
    impala.update(batch, 8)
    assert impala.ratios is not None
    torch.testing.assert_close(impala.ratios.log_ratio, torch.zeros(48), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_what_padding_holds_makes_no_difference(model):
    impala, other = (learner(model, normalise_observations=True) for _ in range(2))
    batch = rollout(impala, model)
    batch["collector", "mask"][0, 13:] = False
    batch["collector", "mask"][2] = False
    changed = batch.clone()
    padding = ~batch["collector", "mask"]
    for key in ("observation", ("next", "observation"), ("next", "reward"), "action_log_prob"):
        changed[key][padding] = float("nan")
    for key in ("action", ("collector", "traj_ids")):
        changed[key][padding] = -7
    for key in ("is_init", ("next", "done"), ("next", "terminated")):
        changed[key][padding] = True
    first, second = impala.update(batch, 0), other.update(changed, 0)
    assert first == second
    assert same(impala, other)
    assert first["train/dropped"] == 0


# -- data that lags


@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_its_ratios_are_those_of_the_usable_frames_before_the_update(model):
    impala = learner(model, max_lag=2, epochs=2)
    assert impala.ratios is None
    batch = rollout(impala, model, steps=20)
    batch["policy_version"][:] = 8
    batch["policy_version"][:, 5:10] = 7
    batch["policy_version"][0, :5] = 9
    batch["policy_version"][1, :5] = -1
    batch["collector", "mask"][2, 15:] = False
    batch["action_log_prob"] -= batch["policy_version"] / 10  # as if the others were more likely
    assert impala.update(batch, 10)["train/dropped"] == 5 + 15
    assert impala.ratios.version.bincount().tolist() == [0] * 8 + [30, 5]
    expected = impala.ratios.version / 10
    torch.testing.assert_close(impala.ratios.log_ratio, expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("unusable", ["old", "random", "padding"])
def test_a_batch_without_usable_frames_teaches_nothing(unusable):
    impala = learner(max_lag=0)
    batch = rollout(impala)
    if unusable == "padding":
        batch["collector", "mask"].zero_()
    else:
        batch["policy_version"][:] = 0 if unusable == "old" else -1
    before = copy.deepcopy(weights_of(impala))
    metrics = impala.update(batch, 1)
    assert metrics["train/dropped"] == (0 if unusable == "padding" else 63)
    assert metrics["train/gradient_steps"] == 0
    assert len(impala.ratios.log_ratio) == 0
    torch.testing.assert_close(weights_of(impala), before, rtol=0, atol=0)


def test_what_is_recorded_beside_random_actions_changes_nothing():
    impala, other = learner(), learner()
    batch = rollout(impala)
    batch["policy_version"][1, :5] = -1
    changed = batch.clone()
    changed["action_log_prob"][1, :5] += 3.0
    assert impala.update(batch, 0) == other.update(changed, 0)
    assert same(impala, other)


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


def test_the_learning_rate_goes_to_nothing():
    impala = learner(total=4 * 63, learning_rate=1.0)
    batch = rollout(impala)
    rates = [impala.update(batch, 0)["train/learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    steady = learner(anneal_learning_rate=False, total=-1)
    assert [steady.update(batch, 0)["train/learning_rate"] for _ in range(2)] == [1e-2, 1e-2]


def test_a_policy_that_does_not_matter_is_drawn_to_entropy():
    impala = learner(entropy_weight=10.0, learning_rate=1e-3, max_grad_norm=0.0)
    with torch.no_grad():
        impala.policy.head.logits.bias[0] = 2.0
    batch = rollout(impala)
    entropies = [impala.update(batch, 0)["train/entropy"] for _ in range(20)]
    assert entropies[-1] > entropies[0] + 0.05


def test_statistics_of_observations_move_after_an_update():
    impala = learner(normalise_observations=True)
    batch = rollout(impala)
    impala.update(batch, 0)
    assert impala.policy.normaliser is not None
    assert impala.policy.normaliser.count == 63
    mean = batch["observation"].mean((0, 1))
    torch.testing.assert_close(impala.policy.normaliser.shift, mean)


# -- the same again

SETTINGS = [
    {},
    {"optimiser": "adam", "epochs": 2},
    {"rmsprop_momentum": 0.9, "normalise_observations": True},
]


@pytest.mark.parametrize("config", SETTINGS)
@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_the_same_seed_gives_the_same_bits(model, config):
    first, second = learner(model, **config), learner(model, **config)
    batch = rollout(first, model)
    torch.rand(7)  # what others draw from the global stream is nothing to the learner
    state = torch.get_rng_state()
    assert first.update(batch, 0) == second.update(batch, 0)
    assert same(first, second)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("config", SETTINGS)
def test_a_restored_learner_goes_on_as_if_it_had_never_stopped(config):
    impala, restored = learner(**config), learner(**config)
    collector = noise(VECTOR, DISCRETE)
    impala.update(collector.collect(impala.policy, 21), 0)
    state = impala.state_dict()
    kept = copy.deepcopy(state)
    batches = [collector.collect(impala.policy, 21) for _ in range(2)]
    expected = [impala.update(batch, 1) for batch in batches]
    torch.testing.assert_close(state, kept, rtol=0, atol=0)  # a copy, which training leaves alone
    restored.load_state_dict(state)
    assert [restored.update(batch, 1) for batch in batches] == expected
    assert same(impala, restored)


# -- what is refused


def test_images_are_not_normalised_by_statistics():
    with pytest.raises(ValueError, match=r"normalise_observations=true model=cnn"):
        learner("cnn", normalise_observations=True)


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
