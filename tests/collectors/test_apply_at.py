"""When new weights are applied: an episode may keep those that it began with, state or lose it."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

from collectors import Collector
from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WorkerError
from tests.collectors.support import (
    COLLECTORS,
    MULTI,
    CodeEnv,
    CodePolicy,
    all_accounted_for,
    build,
    publish,
)

EACH = pytest.mark.parametrize("kind", COLLECTORS)
LOCKED = ("single", "sync")  # whose frames are made when they are asked for
WITH_SCHEMES = [
    ("single", SharedMemWeightSyncScheme),
    ("sync", MultiProcessWeightSyncScheme),
    ("async", SharedMemWeightSyncScheme),
]


def versions_by_trajectory(batches):
    """The versions of each trajectory's frames, by its number."""
    found = {}
    for batch in batches:
        mask = batch["collector", "mask"]
        numbers, stamps = batch["collector", "traj_ids"][mask], batch["policy_version"][mask]
        for number, stamp in zip(numbers.tolist(), stamps.tolist(), strict=True):
            found.setdefault(number, set()).add(stamp)
    return found


@pytest.mark.parametrize(("kind", "scheme"), WITH_SCHEMES)
def test_an_episode_ends_with_the_weights_that_it_began_with(kind, scheme):
    collector, checker = build(
        kind, "one", steps=5, apply_at="episode", weight_sync_schemes={"policy": scheme()}
    )
    batches, published = [], 0
    with collector:
        for _ in range(40):
            batch = collector.next()
            checker.check(batch)
            batches.append(batch)
            if kind in LOCKED:  # an episode has the newest that there were before its batch
                assert (batch["policy_version"][batch["is_init"]] == published).all()
            published = publish(collector)
        assert all_accounted_for(collector.stats())
    found = versions_by_trajectory(batches)
    assert all(len(versions) == 1 for versions in found.values())
    assert len(set().union(*found.values())) > 10
    assert any(not batch["is_init"][:, 0].all() for batch in batches)  # some go on from before


@pytest.mark.parametrize(("kind", "scheme"), WITH_SCHEMES)
def test_an_update_does_not_wait_for_the_end_of_an_episode_and_a_reset_ends_it(kind, scheme):
    sync = {"policy": scheme(sync=True, timeout=0.2)}
    workers = {} if kind == "single" else {"num_workers": 2}
    with COLLECTORS[kind](
        partial(CodeEnv, endless=True),
        CodePolicy(),
        frames_per_batch=10,
        apply_at="episode",
        weight_sync_schemes=sync,
        **workers,
    ) as collector:
        batches = []
        for _ in range(5):
            batches.append(collector.next())
            publish(collector)
        assert all(len(versions) == 1 for versions in versions_by_trajectory(batches).values())
        assert 0 in batches[0]["policy_version"]
        collector.reset()
        while (versions := collector.next()["policy_version"].unique().tolist()) != [5]:
            assert kind == "async"  # it has made frames before
            assert versions[-1] <= 5


@EACH
def test_apply_at_episode_is_refused_with_several_environments_a_worker(kind):
    expected = ValueError if kind == "single" else WorkerError
    why = r"apply_at='episode' needs one environment per worker, but this worker has 3 .*'batch'"
    with pytest.raises(expected, match=why):
        build(kind, apply_at="episode")


@pytest.mark.parametrize("kind", MULTI)
def test_a_pause_in_an_episode_does_not_bring_it_new_weights(kind):
    with COLLECTORS[kind](
        partial(CodeEnv, endless=True), CodePolicy(), frames_per_batch=10, apply_at="episode"
    ) as collector:
        for _ in range(3):
            assert (collector.next()["policy_version"] == 0).all()
            with collector.pause():
                publish(collector)


@pytest.mark.parametrize("kind", LOCKED)
def test_a_state_that_is_loaded_starts_new_episodes_as_their_weights_are_gone(kind):
    collector, checker = build(
        kind, "one", steps=5, apply_at="episode", expecting=["cuts", "skips"]
    )
    with collector:
        checker.check(collector.next())
        publish(collector)
        state = collector.state_dict()
        assert not collector.load_state_dict(state)
        checker.expect_start()
        checker.check(collector.next())
    assert not checker.must_start


# What becomes of the state that a policy carries


class Counts(torch.nn.Module):
    """Counts its calls of an episode in its state, and shows what it was given."""

    in_keys = ("observation", "count", "is_init")
    out_keys = ("action", "weights", "shown", ("next", "count"))

    def __init__(self):
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(()))

    def forward(self, observation, count, is_init):
        if count is None:
            count = torch.zeros(len(observation), 2)
        assert not count[is_init].any()
        action = torch.zeros(len(observation), dtype=torch.int64)
        weights = self.number.expand(len(action)).clone()
        return action, weights, count[:, 0].clone(), count + 1


def expected_counts(batch, before, how):
    """What each frame must show, from the stamps, and the state after the batch by row."""
    rows, steps = batch.batch_size
    shown, stamps = torch.zeros(rows, steps), batch["policy_version"]
    for row in range(rows):
        count, version = before.get(row, (0, 0))
        for t in range(steps):
            updated = int(stamps[row, t]) != version
            if batch["is_init"][row, t] or (updated and how == "zero"):
                count = 0
            version = int(stamps[row, t])
            shown[row, t] = count
            count += 1
        before[row] = count, version
    return shown


@pytest.mark.parametrize(
    ("kind", "env", "how"),
    [
        ("single", "one", "keep"),
        ("single", "sync_same_step", "zero"),
        ("sync", "one", "zero"),
        ("async", "sync_same_step", "zero"),
        ("async", "one", "keep"),
    ],
)
def test_new_weights_leave_a_policys_state_or_zero_it(kind, env, how):
    collector, _ = build(kind, env, steps=5, policy=Counts, state_on_update=how)
    with collector:
        states = [{}, {}]  # async: a batch is one worker's
        mid_episode = 0
        for number in range(24):
            batch = collector.next()
            worker = int(batch["collector", "worker"][0, 0]) if kind == "async" else 0
            shown = expected_counts(batch, states[worker], how)
            assert torch.equal(batch["shown"], shown)
            assert torch.equal(batch["count"][..., 0], shown)  # the state that the batch holds
            assert torch.equal(batch["weights"], batch["policy_version"].float())
            steps = batch["observation"][..., 3]
            assert torch.equal(batch["is_init"], steps == 0)
            mid_episode += int(((shown == 0) & ~batch["is_init"]).sum())
            if number % 3 == 0:
                publish(collector)
    assert (mid_episode > 0) == (how == "zero")


class Sums(torch.nn.Module):
    """Adds its weight times the step of the episode to its state, and shows the state."""

    in_keys = ("observation", "sum", "is_init")
    out_keys = ("action", "weights", "shown", ("next", "sum"))

    def __init__(self):
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(()))

    def forward(self, observation, sum, is_init):
        if sum is None:
            sum = torch.zeros(len(observation))
        assert not sum[is_init].any()
        action = torch.zeros(len(observation), dtype=torch.int64)
        weights = self.number.expand(len(action)).clone()
        return action, weights, sum.clone(), sum + self.number * (1 + observation[:, 3])


@pytest.mark.parametrize(
    ("kind", "env"),
    [("single", "one"), ("single", "sync_same_step"), ("sync", "one"), ("async", "sync_same_step")],
)
def test_new_weights_compute_a_policys_state_anew_from_the_whole_episode(kind, env):
    collector, _ = build(kind, env, steps=5, policy=Sums, state_on_update="recompute")
    with collector:
        mixed = 0
        for number in range(24):
            batch = collector.next()
            steps, version = batch["observation"][..., 3], batch["policy_version"].float()
            # All steps of the episode so far were added with the present weight.
            assert torch.equal(batch["shown"], version * steps * (steps + 1) / 2)
            assert torch.equal(batch["sum"], batch["shown"])
            mixed += int((steps[:, 0] > 0).sum())
            if number % 3 == 0:
                publish(collector)
        assert mixed > 0


class Heedless(gym.Env):
    """Observations that actions do not change; episodes of 9 and more steps."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(9, 20))
        return self._observation(), {}

    def step(self, action):
        self.left -= 1
        return self._observation(), 1.0, self.left == 0, False, {}

    def _observation(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


class Recalls(torch.nn.Module):
    """An LSTM whose actions are drawn."""

    in_keys = ("observation", "state")
    out_keys = ("action", ("next", "state"))

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.cell, self.head = torch.nn.LSTMCell(3, 8), torch.nn.Linear(8, 2)

    def forward(self, observation, state):
        if state is None:
            state = observation.new_zeros(len(observation), 16)
        hidden, cell = self.cell(observation, state.chunk(2, -1))
        action = torch.multinomial(self.head(hidden).softmax(-1), 1).squeeze(-1)
        return action, torch.cat([hidden, cell], -1)


def test_a_recomputed_state_has_the_bits_of_a_worker_that_began_with_the_new_weights():
    """Random streams included: the calls that compute it draw nothing that counts."""

    def frames(first, second=None):
        policy = Recalls(first)
        make = partial(gym.vector.SyncVectorEnv, [Heedless] * 3)
        options = {"frames_per_batch": 18, "seed": 4, "state_on_update": "recompute"}
        with Collector(make, policy, **options) as collector:
            batches = [collector.next(), collector.next()]
            if second is not None:
                policy.load_state_dict(Recalls(second).state_dict())
                collector.update_policy_weights_()
            return torch.cat([*batches, collector.next(), collector.next()], 1)

    changed, always = frames(1, 2), frames(2)
    assert not changed["is_init"][:, 12].all()  # in the middle of episodes
    assert not torch.equal(changed["action"][:, :12], always["action"][:, :12])
    for key in ("observation", "state", "action"):
        assert torch.equal(changed[key][:, 12:], always[key][:, 12:]), key


@pytest.mark.parametrize(("how", "policy"), [("zero", Counts), ("recompute", Sums)])
def test_what_new_weights_make_of_a_state_they_also_make_of_a_saved_one(how, policy):
    def run(save):
        def make():
            options = {"frames_per_batch": 3, "state_on_update": how}
            return Collector(partial(CodeEnv, endless=True), policy(), **options)

        shown = []
        collector = make()
        collector.set_seed(1)
        for number in range(12):
            shown.append(collector.next()["shown"])
            if number in (2, 5):
                publish(collector)
            if save and number in (4, 5, 8):
                state, weights = collector.state_dict(), collector.policy.state_dict()
                collector.shutdown()
                collector = make()
                collector.policy.load_state_dict(weights)
                collector.update_policy_weights_()
                assert collector.load_state_dict(state)
        collector.shutdown()
        return torch.cat(shown)

    assert torch.equal(run(save=True), run(save=False))


@pytest.mark.parametrize("how", ["zero", "recompute"])
def test_a_policy_that_carries_no_state_has_none_to_change(how):
    with pytest.raises(ValueError, match=f"state_on_update='{how}' is for a policy that carries"):
        Collector(CodeEnv, CodePolicy(), frames_per_batch=4, state_on_update=how)
