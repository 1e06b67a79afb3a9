from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensordict.nn import InteractionType, set_interaction_type

from harness.algorithms.compiled import compile_steps
from harness.algorithms.interface import Setup
from harness.algorithms.minibatches import sequences
from harness.algorithms.ppo import PPO, PPOConfig, value_loss_of
from harness.models.encoders import MLPConfig
from harness.options.base import build
from tests.harness.actor_critics import (
    ACTIONS,
    DISCRETE,
    MODELS,
    VECTOR,
    rollout,
    same,
    weights_of,
)
from tests.harness.actor_critics import ppo as learner
from tests.harness.rollouts import PlainCollector, noise

OF_FRAMES = ("decoupled", "ewma", "dual_clip", "vtrace", "truncated_is", "cispo", "m2po", "dppo")
OF_TRAJECTORIES = ("gspo", "sequence_is", "geometric", "vcpo", "vespo")
OFF_POLICY = (*OF_FRAMES, "sapo", "vaco", "a3po", *OF_TRAJECTORIES)


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def close(first: PPO, second: PPO) -> None:
    torch.testing.assert_close(weights_of(first), weights_of(second), rtol=1e-4, atol=1e-5)


# -- the policy


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_policy_puts_out_what_its_out_keys_name(model, actions):
    ppo = learner(model, actions)
    batch = rollout(ppo, model, actions, steps=2)
    assert batch["action"].shape[2:] == ACTIONS[actions].shape
    assert batch["action_log_prob"].shape == (3, 2)


def test_numbers_alone_may_be_seen_and_done():
    number = Box(-1, 1, (), np.float32)
    ppo = PPO(PPOConfig(), Setup(number, number, MLPConfig(hidden_sizes=[8]), total_frames=1000))
    before = copy.deepcopy(ppo)
    batch = noise(number, number).collect(ppo.policy, 21)
    assert batch["action"].shape == batch.shape
    ppo.update(batch, version=0)
    assert not same(before, ppo)


def test_a_deterministic_policy_repeats_itself():
    policy, observation = learner().policy, torch.randn(50, 3)
    with set_interaction_type(InteractionType.DETERMINISTIC):
        assert torch.equal(policy(observation)[0], policy(observation)[0])
    with set_interaction_type(InteractionType.RANDOM):
        assert not torch.equal(policy(observation)[0], policy(observation)[0])


# -- the loss


def test_clipped_values_of_a_worked_example():
    value, old = torch.tensor([2.0, 0.05]), torch.tensor([0.0, 0.0])
    target = torch.tensor([1.0, 1.0])
    # held to 0.2, the first is 0.8 off, less than the 1.0 it really is
    assert float(value_loss_of(PPOConfig(), value, old, target)) == pytest.approx(
        0.5 * (1.0 + 0.95**2) / 2
    )
    far = torch.tensor([0.9, 0.05])  # 0.1 off, but held to 0.2 it is 0.8 off
    assert float(value_loss_of(PPOConfig(), far, old, target)) == pytest.approx(
        0.5 * (0.8**2 + 0.95**2) / 2
    )
    free = value_loss_of(PPOConfig(clip_value=False), far, old, target)
    assert float(free) == pytest.approx(0.5 * (0.1**2 + 0.95**2) / 2)


def test_the_loss_depends_neither_on_the_mean_nor_on_the_scale_of_advantages():
    ppo = learner()
    frames, _ = ppo.assess(rollout(ppo), 0)
    other = {**frames, "advantage": 3 * frames["advantage"] + 5.0}
    torch.testing.assert_close(ppo.loss(other)[0], ppo.loss(frames)[0], rtol=1e-4, atol=1e-5)


# -- what frames were worth


def test_truncation_is_bootstrapped_and_termination_is_not():
    ppo = learner(gamma=0.5, gae_lambda=1.0)
    batch = rollout(ppo, steps=1)
    for name in ("done", "terminated", "truncated"):
        batch["next", name].zero_()
    batch["next", "terminated"][0] = batch["next", "done"][0] = True
    batch["next", "truncated"][1] = batch["next", "done"][1] = True
    with torch.no_grad():
        following = ppo.critic(batch["next", "observation"], torch.empty(0)).squeeze(1)
    target = ppo.assess(batch, 0)[0]["target"]
    reward = batch["next", "reward"].squeeze(1)
    expected = reward + 0.5 * torch.tensor([0.0, 1.0, 1.0]) * following
    torch.testing.assert_close(target, expected)


def test_within_a_row_what_follows_is_the_next_frame():
    ppo = learner(gae_lambda=0.0)
    batch = rollout(ppo, steps=30)
    with torch.no_grad():
        following = ppo.critic(batch["next", "observation"], torch.empty(0))
    goes_on = ~batch["next", "terminated"]
    expected = batch["next", "reward"] + 0.99 * goes_on * following
    assert goes_on.logical_not().any()
    assert batch["next", "truncated"].any()
    torch.testing.assert_close(ppo.assess(batch, 0)[0]["target"].view(3, 30), expected)


# -- data that lags


def test_where_the_policies_agree_every_objective_is_the_same():
    # With a ratio that is never above 3, dual clipping changes nothing.
    names = ("behaviour", "proximal", "decoupled", "dual_clip")
    learners = [learner(objective=name) for name in names]
    batch = rollout(learners[0])
    for ppo in learners:
        ppo.update(batch, 0)
    for ppo in learners[1:]:
        close(learners[0], ppo)


@pytest.mark.parametrize("name", ["ewma", "dual_clip", "vtrace", "truncated_is", "cispo", "m2po"])
def test_the_first_gradient_on_fresh_data_is_the_same_with_every_objective(name):
    once = {"epochs": 1, "minibatch_size": 1000}
    plain, other = learner(**once), learner(objective=name, **once)
    batch = rollout(plain)
    metrics = plain.update(batch, 0), other.update(batch, 0)
    close(plain, other)
    assert metrics[0]["train/grad_norm"] == pytest.approx(metrics[1]["train/grad_norm"], rel=1e-4)


def test_the_decoupled_objective_has_the_weight_of_v_trace_on_its_gradient():
    once = {"epochs": 1, "minibatch_size": 1000, "vtrace": True}
    first = learner(objective={"decoupled": {"weight_cap": 1.5}}, **once)
    second = learner(objective={"vtrace": {"rho": 1.5}}, **once)
    batch = rollout(first)
    batch["action_log_prob"] += torch.randn_like(batch["action_log_prob"])
    norms = [ppo.update(batch, 0)["train/grad_norm"] for ppo in (first, second)]
    close(first, second)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_on_fresh_data_vtrace_changes_nothing():
    plain, corrected = learner(), learner(vtrace=True)
    batch = rollout(plain)
    plain.update(batch, 0)
    corrected.update(batch, 0)
    close(plain, corrected)


def test_the_proximal_objective_takes_any_data_as_its_own():
    ppo, other = learner(objective="proximal"), learner(objective="proximal")
    batch = rollout(ppo)
    changed = batch.clone()
    changed["action_log_prob"] -= 1.0
    ppo.update(batch, 0)
    other.update(changed, 0)
    assert same(ppo, other)


@pytest.mark.parametrize(
    "config", [{}, {"vtrace": True}, *({"objective": name} for name in OFF_POLICY)], ids=str
)
def test_the_other_objectives_heed_the_recorded_probabilities(config):
    ppo, other = learner(**config), learner(**config)
    batch = rollout(ppo)
    changed = batch.clone()
    changed["action_log_prob"][0] -= 1.0
    ppo.update(batch, 0)
    other.update(changed, 0)
    assert not same(ppo, other)


@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_minibatches_hold_whole_trajectories(model):
    ppo = learner(model, objective="gspo", max_lag=2)
    batch = rollout(ppo, model, steps=40)
    batch["policy_version"][:, ::5] = -1  # random actions, which nothing is learned from
    frames, _ = ppo.assess(batch, version=1)
    frames["origin"] = frames["trajectory"]
    parts = [
        {key: x[part["mask"]] for key, x in part.items() if key != "state"}
        if "mask" in part
        else part
        for part in ppo.minibatches(frames)
    ]
    pairs = [
        {*zip(part["trajectory"].tolist(), part["origin"].tolist(), strict=True)} for part in parts
    ]
    assert len(parts) > 2
    assert sum(len(part["action"]) for part in parts) == 3 * 32
    assert all(len(dict(one)) == len(one) == len({o for _, o in one}) for one in pairs)
    origins = [origin for one in pairs for _, origin in one]
    assert len(origins) == len(set(origins)) == len(batch["collector", "traj_ids"].unique())
    for part in parts:
        assert (part["age"] == 1).all()


def test_rows_shorter_than_a_sequence_fill_a_minibatch():
    ppo = learner("lstm", minibatch_size=6, epochs=1)
    batch = rollout(ppo, "lstm", steps=2)
    assert batch.shape == (3, 2)
    assert ppo.sequence_length == 4
    assert ppo.update(batch, 0)["train/gradient_steps"] == 1


def test_frames_that_fill_up_a_sequence_are_not_learned_from():
    rows = {"number": torch.arange(10).view(2, 5)}
    cut = sequences(rows, torch.ones(2, 5, dtype=torch.bool), length=3)
    assert cut["number"].tolist() == [[0, 1, 2], [3, 4, 4], [5, 6, 7], [8, 9, 9]]
    assert cut["mask"].sum(1).tolist() == [3, 2, 3, 2]
    assert not cut["mask"][1::2, 2].any()


def test_sequences_begin_with_the_learners_states():
    ppo = learner("lstm")  # sequences of four frames
    batch = rollout(ppo, "lstm", steps=8)
    frames, _ = ppo.assess(batch, 0)
    after = ppo.view(ppo.rows(batch) | ppo.following(batch)).states
    first, second = frames["state"].unflatten(0, (3, 2)).unbind(1)
    assert torch.equal(first, batch["state"][:, 0])
    assert torch.equal(second, after[:, 3])


@pytest.mark.parametrize("model", ["lstm", "cnn"])
@pytest.mark.parametrize("objective", OF_TRAJECTORIES)
def test_what_lies_between_trajectories_changes_nothing(objective, model):
    ppo = learner(model, objective=objective)
    batch = rollout(ppo, model)
    batch["collector", "mask"][:, -4:] = False
    other, changed = copy.deepcopy(ppo), batch.clone()
    changed["observation"][:, -3:] = 1
    changed["action_log_prob"][:, -4:] = -9.0
    before = copy.deepcopy(ppo)
    ppo.update(batch, 0)
    other.update(changed, 0)
    assert same(ppo, other)
    assert not same(ppo, before)


def test_densities_are_no_probabilities():
    with pytest.raises(ValueError, match=r"algo.objective=dppo bounds .*expected discrete"):
        learner(actions="box", objective="dppo")


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_scores_are_the_gradients_of_the_last_layer(model, actions):
    ppo = learner(model, actions)
    features = torch.randn(2, 3, ppo.policy.encoder.num_features)
    action = torch.stack([torch.as_tensor(ACTIONS[actions].sample()) for _ in range(6)])
    action = action.unflatten(0, (2, 3))
    head = ppo.policy.head
    rows = ppo.scores(features, action)
    for place in itertools.product(range(2), range(3)):
        log_prob = head.log_prob(head(features[place]), action[place])
        gradients = torch.autograd.grad(log_prob, list(head.layer.parameters()))
        expected = torch.cat([gradient.flatten() for gradient in gradients])
        torch.testing.assert_close(rows[place], expected)


def test_a_step_may_be_smaller_than_the_learning_rate():
    config = {"objective": "vcpo", "epochs": 1, "minibatch_size": 1000}
    start, ppo, other = (learner(**config) for _ in range(3))
    batch, scale = rollout(start), torch.tensor(0.5)
    of_ppo, of_other = ppo.loss, other.loss
    ppo.loss = lambda part: (of_ppo(part)[0], {})
    other.loss = lambda part: (of_other(part)[0], {"step_scale": scale})
    for one in (ppo, other):
        one.update(batch, 0)  # one step of Adam, as long as the learning rate
    first, moved, half = (dict(one.policy.named_parameters()) for one in (start, ppo, other))
    for name, parameter in first.items():
        torch.testing.assert_close(half[name] - parameter, scale * (moved[name] - parameter))


def test_gradient_steps_are_counted_as_they_are_done():
    batch = rollout(learner())
    assert learner(epochs=3).update(batch, 0)["train/gradient_steps"] == 3 * 4
    held = learner(epochs=10, target_kl=1e-3).update(batch, 0)
    assert held["train/gradient_steps"] == held["train/epochs"] * 4 < 40
    assert learner(max_lag=0).update(batch, 1)["train/gradient_steps"] == 0


def test_the_cap_on_errors_and_the_cap_on_traces_are_two_options():
    batch = rollout(learner())
    batch["action_log_prob"] -= 0.5  # as if the actions had become likelier
    configs = [{"vtrace_c": 1.0}, {"vtrace_c": 0.5}, {"vtrace_rho": 0.5}]
    advantages = [
        learner(vtrace=True, **config).assess(batch, 0)[0]["advantage"] for config in configs
    ]
    for first, second in itertools.combinations(advantages, 2):
        assert not torch.equal(first, second)


def test_the_proximal_policy_of_ewma_averages_the_weights_of_gradient_steps():
    ppo = learner(objective={"ewma": {"proximal_decay": 0.5}}, epochs=1, minibatch_size=1000)
    (*_, first), batch = ppo.policy.parameters(), rollout(ppo)
    history = [first.detach().clone()]
    for version in range(2):
        ppo.update(batch, version)
        history.append(first.detach().clone())
    (*_, mean) = ppo.averaged.module.parameters()
    torch.testing.assert_close(mean, (history[0] / 4 + history[1] / 2 + history[2]) / 1.75)


def test_with_ewma_ratios_are_clipped_against_the_average():
    """Which is the learner itself if nothing older counts: so no step is ever clipped."""
    batch = rollout(learner())
    fresh = learner(objective={"ewma": {"proximal_decay": 0.0}}, epochs=10).update(batch, 0)
    slow = learner(objective={"ewma": {"proximal_decay": 0.99}}, epochs=10).update(batch, 0)
    assert fresh["train/clip_fraction"] == 0 < slow["train/clip_fraction"]
    assert fresh["train/approx_kl"] < 1e-6


# -- normalisation


def test_the_statistics_of_rewards_are_those_of_the_frames():
    ppo = learner(normalise_rewards=True)
    batch = rollout(ppo)
    batch["collector", "mask"][0, 11:] = False
    ppo.update(batch, 0)
    assert ppo.reward_normaliser.count == 53
    batch["collector", "mask"].zero_()
    before = copy.deepcopy(weights_of(ppo))
    ppo.update(batch, 0)
    torch.testing.assert_close(weights_of(ppo), before, rtol=0, atol=0)


def test_what_observations_are_scaled_by_is_part_of_the_weights_and_nothing_else_is():
    names = learner(normalise_observations=True, normalise_rewards=True).policy.state_dict()
    found = {name for name in names if "normaliser" in name}
    assert found == {"normaliser.shift", "normaliser.scale"}


# -- the course of an update


def test_epochs_end_once_the_policy_has_moved_far_enough():
    eager, held = learner(epochs=10), learner(epochs=10, target_kl=1e-3)
    batch = rollout(eager)
    assert eager.update(batch, 0)["train/epochs"] == 10
    assert held.update(batch, 0)["train/epochs"] < 10


def test_how_far_the_policy_has_moved_is_measured_from_the_start_of_the_update():
    """Data that lags is far from it before the first step, and that ends no epochs."""
    ppo = learner(epochs=3, learning_rate=1e-6, target_kl=0.01)
    batch = rollout(ppo)
    batch["action_log_prob"] -= 1.0
    metrics = ppo.update(batch, 0)
    assert metrics["train/approx_kl"] > 0.5
    assert metrics["train/update_kl"] < 1e-4
    assert metrics["train/epochs"] == 3


def test_every_frame_is_learned_from_once_an_epoch():
    ppo = learner(minibatch_size=10)
    frames, _ = ppo.assess(rollout(ppo), 0)
    frames["number"] = torch.arange(63)
    parts = [part["number"] for part in ppo.minibatches(frames)]
    assert [len(part) for part in parts] == [11, 11, 11, 10, 10, 10]
    assert torch.cat(parts).sort().values.tolist() == list(range(63))


def test_each_epoch_puts_the_frames_into_other_minibatches():
    ppo = learner(minibatch_size=16)
    frames = {"action": torch.arange(64)}
    epochs = [[part["action"].tolist() for part in ppo.minibatches(frames)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(64))


@pytest.mark.parametrize(
    ("model", "objective"),
    [("mlp", "behaviour"), ("mlp", "gspo"), ("lstm", "behaviour"), ("lstm", "gspo")],
)
def test_without_shuffling_minibatches_follow_each_other_in_time(model, objective):
    ppo = learner(model, objective=objective, shuffle=False)
    frames, _ = ppo.assess(rollout(ppo, model, steps=40), 0)
    times = []
    for _ in range(2):
        parts = [ppo.layout.frames(part)["time"] for part in ppo.minibatches(frames)]
        assert len(parts) > 2
        firsts = [int(part.min()) for part in parts]
        assert firsts == sorted(firsts)
        assert firsts[0] < firsts[-1]
        times.append(torch.cat(parts).tolist())
    assert times[0] == times[1]
    assert sorted(times[0]) == sorted(list(range(40)) * 3)


def test_the_state_is_tensors_and_numbers_by_name():
    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            for part in value.values():
                check(part)
        else:
            assert isinstance(value, torch.Tensor | int | float)

    ppo = learner(normalise_rewards=True)
    ppo.update(rollout(ppo), 0)
    check(ppo.state_dict())


# -- what is refused


def test_the_loss_of_a_recurrent_model_is_not_compiled():
    with pytest.raises(ValueError, match=r"algo\.compile=true model=lstm: .*expected false"):
        compile_steps(learner("lstm", compile=True), "lstm")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"learning_rate": 0.0}, "algo.learning_rate=0.0: expected .*more than 0"),
        ({"learning_rate": float("nan")}, "algo.learning_rate=nan: "),
        ({"gamma": 1.5}, "algo.gamma=1.5: expected .*0 to 1"),
        ({"gae_lambda": -0.1}, "algo.gae_lambda=-0.1: "),
        ({"epochs": 0}, "algo.epochs=0: expected .*1 or more"),
        ({"minibatch_size": 0}, "algo.minibatch_size=0: "),
        ({"clip": 0.0}, "algo.clip=0.0: "),
        ({"target_kl": 0.0}, "algo.target_kl=0.0: "),
        ({"max_lag": -1}, "algo.max_lag=-1: expected .*0 or more"),
        ({"vtrace_rho": 0.0}, "algo.vtrace_rho=0.0: "),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        build(PPOConfig, change, "algo")


def test_plain_collectors_carry_state_as_ours_do():
    """What these tests rest on: state is recorded before a step and forgotten after an episode."""
    ppo = learner("lstm")
    collector: PlainCollector = noise(VECTOR, DISCRETE)
    batch = collector.collect(ppo.policy, 40)
    done = batch["next", "done"][:, :-1]
    assert done.any()
    assert batch["state"][:, 1:][done].abs().sum() == 0
    carried = batch["next", "state"][:, :-1][~done]
    assert torch.equal(batch["state"][:, 1:][~done], carried)
