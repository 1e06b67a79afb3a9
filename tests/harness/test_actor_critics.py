"""What PPO and IMPALA both promise."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from collectors import Collector
from tests.harness.actor_critics import (
    ACTIONS,
    DISCRETE,
    VECTOR,
    impala,
    ppo,
    rollout,
    same,
    weights_of,
)
from tests.harness.rollouts import Noise, noise

LEARNERS = {
    "ppo": ppo,
    "ppo, vtrace": partial(ppo, vtrace=True),
    "impala": impala,
}
NORMALISED = {"normalise_observations": True}
ALL_NORMALISED = {**NORMALISED, "normalise_rewards": True}
# Of each learner the options that have a state of their own, and those that make more of one step.
SETTINGS = {
    "ppo": partial(ppo, **ALL_NORMALISED),
    "ppo, ewma": partial(ppo, objective="ewma", **ALL_NORMALISED),
    "impala": impala,
    "impala, adam": partial(impala, optimiser="adam", epochs=2),
    "impala, momentum": partial(impala, rmsprop_momentum=0.9, **NORMALISED),
}
each_learner = pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS)
each_setting = pytest.mark.parametrize("learner", SETTINGS.values(), ids=SETTINGS)
each_memory = pytest.mark.parametrize("model", ["mlp", "lstm"])


@pytest.fixture(autouse=True)
def _seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


# -- what the learner sees


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize(
    ("model", "normalise"),
    [("mlp", False), ("mlp", True), ("lstm", False), ("lstm", True), ("cnn", False)],
)
@pytest.mark.parametrize("make", [partial(ppo, objective="decoupled"), impala])
def test_on_new_data_the_learner_sees_the_recorded_probabilities(make, model, actions, normalise):
    """Through normalisation, memory and the ends of episodes alike."""
    # A small step: with large weights, rows computed together and alone differ by more rounding on
    # some processors.
    learner = make(model, actions, learning_rate=1e-3, normalise_observations=normalise)
    before = copy.deepcopy(learner.policy.state_dict())
    if model != "cnn":  # which would take long, and is no different in this
        learner.update(rollout(learner, model, actions), 0)
        assert not all(torch.equal(before[k], v) for k, v in learner.policy.state_dict().items())
    learner.update(rollout(learner, model, actions), 1)
    assert learner.ratios is not None
    torch.testing.assert_close(learner.ratios.log_ratio, torch.zeros(63), rtol=1e-4, atol=1e-5)


@each_learner
def test_a_state_that_new_weights_zeroed_is_zero_to_the_learner_too(learner):
    one = learner("lstm")
    batches = []
    with Collector(
        partial(Noise, VECTOR, DISCRETE), one.policy, frames_per_batch=6, state_on_update="zero"
    ) as collector:
        for _ in range(8):
            batches.append(collector.next())
            collector.update_policy_weights_()
    batch = torch.cat(batches, 1)
    assert (~batch["state"].any(-1) & ~batch["is_init"]).any()
    one.update(batch, 8)
    torch.testing.assert_close(one.ratios.log_ratio, torch.zeros(48), rtol=1e-4, atol=1e-5)


@each_memory
@pytest.mark.parametrize("make", [partial(ppo, normalise_rewards=True, vtrace=True), impala])
def test_what_padding_holds_makes_no_difference(make, model):
    first, second = (make(model, **NORMALISED) for _ in range(2))
    batch = rollout(first, model)
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
    metrics = first.update(batch, 0)
    assert metrics == second.update(changed, 0)
    assert same(first, second)
    assert metrics["train/dropped"] == 0


# -- data that lags


@each_memory
@pytest.mark.parametrize(
    "make",
    [
        *(partial(ppo, objective=o) for o in ("behaviour", "proximal", "decoupled")),
        *(partial(ppo, vtrace=True, objective=o) for o in ("behaviour", "proximal", "decoupled")),
        partial(impala, epochs=2),
    ],
)
def test_its_ratios_are_those_of_the_usable_frames_before_the_update(make, model):
    learner = make(model, max_lag=2)
    assert learner.ratios is None
    batch = rollout(learner, model, steps=20)
    batch["policy_version"][:] = 8
    batch["policy_version"][:, 5:10] = 7
    batch["policy_version"][0, :5] = 9
    batch["policy_version"][1, :5] = -1
    batch["collector", "mask"][2, 15:] = False
    batch["action_log_prob"] -= batch["policy_version"] / 10  # as if the others were more likely
    assert learner.update(batch, 10)["train/dropped"] == 5 + 15
    assert learner.ratios.version.bincount().tolist() == [0] * 8 + [30, 5]
    expected = learner.ratios.version / 10
    torch.testing.assert_close(learner.ratios.log_ratio, expected.float(), rtol=0, atol=1e-5)


@each_learner
@each_memory
def test_frames_that_lag_too_much_are_dropped_and_counted(learner, model):
    one = learner(model, max_lag=2)
    batch = rollout(one, model, steps=20)
    batch["policy_version"][:, :5] = 6
    batch["policy_version"][:, 5:] = 8
    assert one.update(batch, 10)["train/dropped"] == 15
    assert len(one.ratios.version) == 45


@each_learner
@each_memory
def test_masked_frames_stay_in_the_mean_without_weight(learner, model):
    """A mean over 60 frames of which 15 are zero is three quarters of the mean over 45.

    So is the gradient. What is reported of the loss is the mean over the 45.
    """
    options = {"max_lag": 2, "max_grad_norm": 0, "epochs": 1, **plain_advantages(learner)}
    if learner is not impala:
        options["minibatch_size"] = 1000
    dropping, masking = (learner(model, on_stale=x, **options) for x in ("drop", "mask"))
    batch = rollout(dropping, model, steps=20)
    batch["policy_version"][:, :5] = 6  # of each row, so that no frame is before them
    batch["policy_version"][:, 5:] = 8
    dropped, masked = dropping.update(batch, 10), masking.update(batch, 10)
    assert masked["train/dropped"] == dropped["train/dropped"] == 15
    assert len(masking.ratios.version) == 45
    for name, share in {"policy_loss": 1, "value_loss": 1, "entropy": 1, "grad_norm": 0.75}.items():
        assert masked[f"train/{name}"] == pytest.approx(share * dropped[f"train/{name}"], rel=1e-3)


def test_the_entropy_that_is_reported_is_that_of_the_frames_that_count():
    """In minibatches, of which each holds other frames that are masked."""
    one = ppo(max_lag=2, on_stale="mask", learning_rate=1e-12, minibatch_size=8)
    batch = rollout(one, steps=20)
    batch["policy_version"][:] = 6
    batch["policy_version"][0, :7] = 9
    with torch.no_grad():
        log_probs = one.policy.head(one.policy.encoder(batch["observation"]))
        expected = one.policy.head.entropy(log_probs)[0, :7].mean()
    assert one.update(batch, 10)["train/entropy"] == pytest.approx(float(expected), rel=1e-5)


@each_learner
@each_memory
def test_what_masked_frames_hold_changes_nothing(learner, model):
    first, second = (
        learner(model, max_lag=2, on_stale="mask", **plain_advantages(learner)) for _ in range(2)
    )
    batch = rollout(first, model, steps=20)
    batch["policy_version"][:, :5] = 6
    batch["policy_version"][:, 5:] = 8
    changed = batch.clone()
    changed["next", "reward"][:, :5] += 3.0
    changed["action_log_prob"][:, :5] += 2.0
    first.update(batch, 10)
    second.update(changed, 10)
    assert same(first, second)


@each_learner
@each_memory
def test_masking_where_nothing_is_too_old_is_learning_from_all(learner, model):
    first, second = (learner(model, max_lag=2, on_stale=x) for x in ("drop", "mask"))
    batch = rollout(first, model)
    assert first.update(batch, 2) == second.update(batch, 2)
    assert same(first, second)


@pytest.mark.parametrize("model", ["lstm", "mlp"])
def test_masked_frames_count_in_the_weight_of_their_trajectory(model):
    options = {"max_lag": 2, "objective": "sequence_is", **plain_advantages(ppo)}
    batch = rollout(ppo(model, **options), model)
    batch["policy_version"][:] = 8
    batch["policy_version"][:, :5] = 6
    shifted = batch.clone()
    shifted["action_log_prob"][:, :5] += 0.5
    losses = {
        how: [
            ppo(model, on_stale=how, **options).update(frames.clone(), 10)["train/policy_loss"]
            for frames in (batch, shifted)
        ]
        for how in ("drop", "mask")
    }
    assert losses["drop"][0] == losses["drop"][1]
    assert losses["mask"][0] != losses["mask"][1]


def plain_advantages(learner) -> dict[str, bool]:
    """PPO's advantages as they are: masked frames would count in their mean and variance."""
    return {} if learner is impala else {"normalise_advantages": False}


@each_learner
@pytest.mark.parametrize("stale", ["drop", "mask"])
@pytest.mark.parametrize("unusable", ["old", "random", "padding"])
def test_a_batch_without_usable_frames_teaches_nothing(learner, unusable, stale):
    one = learner(max_lag=0, on_stale=stale, normalise_observations=unusable == "padding")
    batch = rollout(one)
    if unusable == "padding":
        batch["collector", "mask"].zero_()
    else:
        batch["policy_version"][:] = 0 if unusable == "old" else -1
    before = copy.deepcopy(weights_of(one))
    metrics = one.update(batch, 1)
    assert metrics["train/dropped"] == (0 if unusable == "padding" else 63)
    assert metrics["train/gradient_steps"] == 0
    assert len(one.ratios.log_ratio) == 0
    torch.testing.assert_close(weights_of(one), before, rtol=0, atol=0)


@each_learner
def test_nothing_is_learned_from_random_actions(learner):
    one = learner()
    batch = rollout(one)
    batch["policy_version"][1] = -1
    assert one.update(batch, 0)["train/dropped"] == 21


@each_learner
def test_what_is_recorded_beside_random_actions_changes_nothing(learner):
    first, second = learner(), learner()
    batch = rollout(first)
    batch["policy_version"][1, :5] = -1
    changed = batch.clone()
    changed["action_log_prob"][1, :5] += 3.0
    assert first.update(batch, 0) == second.update(changed, 0)
    assert same(first, second)


# -- the course of an update


@each_learner
def test_the_learning_rate_goes_to_nothing(learner):
    one = learner(total=4 * 63, learning_rate=1.0)
    batch = rollout(one)
    rates = [one.update(batch, 0)["train/learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    steady = learner(anneal_learning_rate=False, total=-1)
    assert [steady.update(batch, 0)["train/learning_rate"] for _ in range(2)] == [1e-2, 1e-2]


@each_learner
def test_a_policy_without_gain_is_drawn_to_entropy(learner):
    one = learner(entropy_weight=10.0, learning_rate=1e-3, max_grad_norm=0.0, epochs=1)
    with torch.no_grad():
        one.policy.head.logits.bias[0] = 2.0
    batch = rollout(one)
    entropies = [one.update(batch, 0)["train/entropy"] for _ in range(20)]
    assert entropies[-1] > entropies[0] + 0.05


@each_learner
def test_only_an_update_moves_the_statistics_of_observations(learner):
    one = learner(**NORMALISED)
    before = copy.deepcopy(dict(one.policy.named_buffers()))
    batch = rollout(one)
    one.policy.train()
    one.policy(torch.randn(50, 3) * 100)
    for name, value in one.policy.named_buffers():
        assert torch.equal(value, before[name])
    one.update(batch, 0)
    assert one.policy.normaliser is not None
    assert one.policy.normaliser.count == 63
    torch.testing.assert_close(one.policy.normaliser.shift, batch["observation"].mean((0, 1)))


@each_learner
def test_images_are_not_normalised_by_statistics(learner):
    with pytest.raises(ValueError, match=r"normalise_observations=true model=cnn"):
        learner("cnn", **NORMALISED)


# -- the same again


@each_setting
@each_memory
def test_the_same_seed_gives_the_same_bits_and_the_global_stream_is_left_alone(learner, model):
    first, second = learner(model), learner(model)
    batch = rollout(first, model)
    torch.rand(7)  # what others draw from the global stream is nothing to the learner
    state = torch.get_rng_state()
    assert first.update(batch, 0) == second.update(batch, 0)
    assert same(first, second)
    assert torch.equal(torch.get_rng_state(), state)


@each_setting
@each_memory
def test_a_restored_learner_goes_on_as_if_it_had_never_stopped(learner, model):
    one, restored = learner(model), learner(model)
    collector = noise(VECTOR, DISCRETE)
    one.update(collector.collect(one.policy, 21), 0)
    state = one.state_dict()
    kept = copy.deepcopy(state)
    batches = [collector.collect(one.policy, 21) for _ in range(2)]
    expected = [one.update(batch, 1) for batch in batches]
    torch.testing.assert_close(state, kept, rtol=0, atol=0)  # a copy, which training leaves alone
    restored.load_state_dict(state)
    assert [restored.update(batch, 1) for batch in batches] == expected
    assert same(one, restored)
