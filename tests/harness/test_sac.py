from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import AffineTransform, TanhTransform

from harness.algorithms.interface import Setup
from harness.algorithms.sac import SAC, SACConfig, SACPolicy
from harness.models.encoders import LSTMConfig, MLPConfig
from harness.options import ConfigError
from harness.options.base import build
from tests.harness.config.composed import config_of

OBSERVATIONS = Box(-1, 1, (3,), np.float32)
ACTIONS = Box(np.float32([-2, 1]), np.float32([4, 2]))
MODEL = MLPConfig(hidden_sizes=[16, 16], activation="relu")


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def learner(seed: int = 0, **config: Any) -> SAC:
    return SAC(SACConfig(**config), Setup(OBSERVATIONS, ACTIONS, MODEL, seed=seed))


def samples(num: int = 32, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    observation, following = torch.randn(2, num, 3, generator=generator)
    action = torch.rand(num, 2, generator=generator) * torch.tensor([6.0, 1.0])
    return TensorDict(
        {
            "observation": observation,
            "action": action + torch.tensor([-2.0, 1.0]),
            "next": {
                "observation": following,
                "reward": torch.randn(num, generator=generator),
                "terminated": torch.rand(num, generator=generator) < 0.3,
                "truncated": torch.rand(num, generator=generator) < 0.3,
            },
            "collector": {"mask": torch.ones(num, dtype=torch.bool)},
        },
        batch_size=[num],
    )


def weights_of(sac: SAC) -> list[torch.Tensor]:
    state = sac.state_dict()
    parts = [state["policy"], state["critics"], state["target_critics"]]
    return [value for part in parts for value in part.values()] + [state["log_alpha"]]


def same(first: SAC, second: SAC) -> bool:
    pairs = zip(weights_of(first), weights_of(second), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# -- the policy


@torch.no_grad()
def test_log_probabilities_are_those_of_a_squashed_and_scaled_gaussian():
    policy = learner().policy
    inputs = torch.randn(200, 3)
    action, log_prob = policy.sample(inputs, torch.randn(200, 2))
    mean, log_std = policy.gaussian(inputs)
    low, high = torch.as_tensor(ACTIONS.low), torch.as_tensor(ACTIONS.high)
    expected = TransformedDistribution(
        Normal(mean, log_std.exp()),
        [TanhTransform(), AffineTransform((high + low) / 2, (high - low) / 2)],
    )
    inside = ((action - low) > 1e-3) & ((high - action) > 1e-3)
    torch.testing.assert_close(
        log_prob[inside.all(1)],
        expected.log_prob(action).sum(-1)[inside.all(1)],
        rtol=1e-3,
        atol=1e-3,
    )


@torch.no_grad()
def test_the_networks_second_half_is_squashed_to_the_range_of_log_deviations():
    policy = learner().policy
    policy.output.weight.zero_()
    policy.output.bias.copy_(torch.tensor([0.7, -3.0, 0.0, 0.8]))  # of two actions
    mean, log_std = policy.gaussian(torch.randn(5, 3))
    torch.testing.assert_close(mean, torch.tensor([[0.7, -3.0]]).expand(5, 2))
    # from -5 to 2: the middle at 0, and 3.5 tanh(0.8) above it
    expected = torch.tensor([[-1.5, -1.5 + 3.5 * math.tanh(0.8)]]).expand(5, 2)
    torch.testing.assert_close(log_std, expected)


@torch.no_grad()
def test_the_density_of_actions_integrates_to_one():
    """Over the action space itself, so that scale and squashing are both accounted for."""
    space = Box(-3.0, 5.0, (1,), np.float32)
    policy = SACPolicy(MODEL, OBSERVATIONS, space).double()
    inputs = torch.randn(1, 3, dtype=torch.float64)
    mean, log_std = policy.gaussian(inputs)
    edge = 1 - 1e-9
    actions = torch.linspace(-3.0, 5.0, 400_001, dtype=torch.float64).unsqueeze(1)
    raw = ((actions - policy.centre) / policy.scale).clamp(-edge, edge).atanh()
    noise = (raw - mean) / log_std.exp()
    found, log_prob = policy.sample(inputs.expand(len(noise), 3), noise)
    torch.testing.assert_close(found, actions, rtol=0, atol=1e-6)
    assert float(torch.trapezoid(log_prob.exp(), actions.squeeze(1))) == pytest.approx(1, abs=1e-4)


@torch.no_grad()
def test_log_probabilities_stay_finite_where_squashing_rounds_to_the_bound():
    policy = learner().policy
    _, log_prob = policy.sample(torch.randn(4, 3), torch.full((4, 2), 300.0))
    assert log_prob.isfinite().all()


def test_actions_keep_to_the_bounds_and_the_most_likely_one_is_always_the_same():
    policy, observation = learner().policy, torch.randn(100, 3) * 10
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        drawn = policy(observation)
        assert not torch.equal(drawn, policy(observation))
    assert all(ACTIONS.contains(action) for action in drawn.numpy())
    with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
        assert torch.equal(policy(observation), policy(observation))


# -- the critics


def test_the_two_critics_are_what_two_networks_would_be():
    critics = learner().critics
    inputs, action = torch.randn(5, 3), torch.randn(5, 2)
    both = critics(inputs, action)
    for i in range(2):
        value = torch.cat([inputs, action], -1)
        for number, (layer, bias) in enumerate(zip(critics.layers, critics.biases, strict=True)):
            value = (value.relu() if number else value) @ layer[i] + bias[i]
        torch.testing.assert_close(both[i], value.squeeze(1))
    assert not torch.allclose(both[0], both[1])


@pytest.mark.parametrize(("end", "matters"), [("terminated", True), ("truncated", False)])
def test_what_follows_counts_after_truncation_and_not_after_termination(end, matters):
    first, second = learner(), learner()
    batch = samples()
    batch["next", "terminated"].zero_()
    batch["next", "truncated"].zero_()
    ended = batch.clone()
    ended["next", end].fill_(True)
    first.update(batch)
    second.update(ended)
    assert same(first, second) is not matters


def test_what_is_seen_after_a_termination_does_not_matter():
    first, second = learner(), learner()
    batch = samples()
    changed = batch.clone()
    changed["next", "observation"][batch["next", "terminated"]] = math.inf
    first.update(batch)
    second.update(changed)
    assert same(first, second)


def test_target_critics_follow_slowly():
    sac = learner(tau=0.1)
    old = [p.clone() for p in sac.target_critics.parameters()]
    sac.update(samples())
    new = zip(old, sac.critics.parameters(), sac.target_critics.parameters(), strict=True)
    for before, critic, target in new:
        torch.testing.assert_close(target, before + 0.1 * (critic.detach() - before))


def test_the_first_loss_of_a_worked_example():
    sac = learner(auto_alpha=False, alpha=0.5, gamma=0.9)
    batch = samples(8)
    noise = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        action, log_prob = sac.policy.sample(batch["next", "observation"], noise)
        best = sac.target_critics(batch["next", "observation"], action).amin(0) - 0.5 * log_prob
        target = batch["next", "reward"] + 0.9 * best * ~batch["next", "terminated"]
        errors = sac.critics(batch["observation"], batch["action"]) - target
    expected = float(errors.square().mean(1).sum())
    assert sac.update(batch)["train/critic_loss"] == pytest.approx(expected, rel=1e-4)


# -- updates


def test_temperature_rises_while_entropy_is_below_its_target_and_falls_above():
    cold, hot = (learner(target_entropy=entropy, alpha=0.2) for entropy in (100.0, -100.0))
    for _ in range(4):
        rising, falling = cold.update(samples()), hot.update(samples())
    assert rising["train/alpha"] > 0.2 > falling["train/alpha"]
    assert float(learner(auto_alpha=False, alpha=0.2).log_alpha.exp()) == pytest.approx(0.2)


def test_the_usual_target_entropy_asks_as_much_in_any_unit_of_the_actions():
    inputs, noise = torch.randn(64, 3), torch.randn(64, 2)
    excess = []
    for bound in (1.0, 0.01, 100.0):
        sac = SAC(SACConfig(), Setup(OBSERVATIONS, Box(-bound, bound, (2,), np.float32), MODEL))
        _, log_prob = sac.policy.sample(inputs, noise)
        excess.append(-log_prob.mean().item() - sac.target_entropy)
    assert excess == pytest.approx([excess[0]] * 3, rel=1e-4)
    assert SAC(SACConfig(), Setup(OBSERVATIONS, Box(-1, 1, (2,)), MODEL)).target_entropy == -2


def test_a_given_temperature_stays():
    sac = learner(auto_alpha=False, alpha=0.3)
    for _ in range(4):
        metrics = sac.update(samples())
    assert metrics["train/alpha"] == pytest.approx(0.3)


def test_the_policy_takes_its_steps_late_but_takes_them_all():
    sac = learner(policy_delay=3)

    for _ in range(3):
        assert sac.state_dict()["policy_optimiser"]["step.0"] == 0
        sac.update(samples())
    assert sac.state_dict()["policy_optimiser"]["step.0"] == 3
    assert sac.state_dict()["critic_optimiser"]["step.0"] == 3


def test_normalised_observations_are_those_of_a_learner_that_sees_them_normalised():
    normal, plain = learner(normalise_observations=True), learner()
    batch = samples(64)
    normal.observe(batch["observation"] * 50 + 7)
    seen = batch.clone()
    for place in ("observation", ("next", "observation")):
        seen[place] = normal.policy.prepare(batch[place])
    assert not torch.equal(seen["observation"], batch["observation"])
    for sac, given in ((normal, batch), (plain, seen)):
        sac.update(given)
    assert torch.equal(normal.critics.layers[0], plain.critics.layers[0])
    with set_interaction_type(InteractionType.DETERMINISTIC):
        actions = normal.policy(batch["observation"]), plain.policy(seen["observation"])
    assert torch.equal(*actions)


# -- the same again


def test_the_same_seed_gives_the_same_bits_and_the_global_stream_is_left_alone():
    first, second, other = learner(), learner(), learner(seed=1)
    state = torch.get_rng_state()
    results = [[sac.update(samples(seed=i)) for i in range(4)] for sac in (first, second)]
    assert results[0] == results[1]
    assert same(first, second)
    assert not same(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_restored_learner_goes_on_as_if_it_had_never_stopped(normalise):
    options = {"updates_per_frame": 0.4, "normalise_observations": normalise}
    sac, restored = learner(**options), learner(**options)
    for i in range(3):
        sac.observe(samples(seed=i)["observation"] * 3 + 1)
        sac.update(samples(seed=i))
    sac.updates_due(1)
    state = sac.state_dict()
    kept = copy.deepcopy(state)
    expected = [sac.update(samples(seed=i))["train/critic_loss"] for i in (5, 6)]
    torch.testing.assert_close(state, kept, rtol=0, atol=0)
    restored.load_state_dict(state)
    found = [restored.update(samples(seed=i))["train/critic_loss"] for i in (5, 6)]
    assert found == expected
    assert same(sac, restored)
    assert restored.updates_due(2) == sac.updates_due(2) == 1


def test_numbers_alone_may_be_seen_and_done():
    number = Box(-1, 1, (), np.float32)
    sac = SAC(SACConfig(), Setup(number, number, MODEL))
    before = copy.deepcopy(sac)
    found = samples(8)
    found["observation"], found["next", "observation"] = torch.randn(2, 8)
    found["action"] = sac.policy(found["observation"])
    assert found["action"].shape == (8,)
    sac.update(found)
    assert not same(before, sac)


# -- what is refused


@pytest.mark.parametrize(
    ("space", "complaint"),
    [
        (Discrete(3), "algo=sac acts in Box spaces of floats, and this is Discrete"),
        (Box(-math.inf, math.inf, (1,)), "algo=sac needs finite bounds"),
        (Box(np.float32([0, 1]), np.float32([2, 1])), "with low < high for every action"),
    ],
)
def test_a_space_without_bounds_is_refused(space, complaint):
    with pytest.raises(ValueError, match=complaint):
        SAC(SACConfig(), Setup(OBSERVATIONS, space, MODEL))


def test_a_model_with_memory_is_refused():
    with pytest.raises(ValueError, match="algo=sac learns with model=mlp, got model=lstm"):
        SAC(SACConfig(), Setup(OBSERVATIONS, ACTIONS, LSTMConfig()))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tau": 1.5}, r"algo.tau=1.5: expected a number .more than 0, 1 or less"),
        ({"updates_per_frame": 0.0}, "algo.updates_per_frame=0.0: expected a number .more than 0"),
        ({"alpha": 0.0}, "algo.alpha=0.0: "),
        ({"policy_delay": 0}, "algo.policy_delay=0: "),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        build(SACConfig, change, "algo")


def test_a_replay_buffer_smaller_than_a_batch_is_refused():
    with pytest.raises(ConfigError, match=r"algo.buffer_size=10: expected 256 or more"):
        config_of("algo=sac", "env=pendulum", "algo.buffer_size=10")
