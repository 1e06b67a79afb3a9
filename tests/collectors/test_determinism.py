"""Same seed, same bits; and a collector that goes on is one that was never interrupted."""

from __future__ import annotations

import itertools
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeLimit
from tensordict.nn import InteractionType, interaction_type
from torch import nn

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from collectors.rollout.shared_counters import MESSAGES
from sync import SharedMemWeightSyncScheme
from tests.collectors.support import (
    Checker,
    CodeEnv,
    CodePolicy,
    Gate,
    GatedEnv,
    all_accounted_for,
    same_bits,
)
from tests.collectors.troubled import wait_until

IDS = {"CartPole-v1": 4, "Pendulum-v1": 3}


class Sampling(nn.Module):
    """Draws its actions from torch's global stream."""

    out_keys = ("action", "logits")

    def __init__(self, name: str = "CartPole-v1"):
        super().__init__()
        self.discrete = name.startswith("CartPole")
        torch.manual_seed(7)
        self.layer = nn.Linear(IDS[name], 2 if self.discrete else 1)

    def forward(self, observation):
        out = self.layer(observation)
        if not self.discrete:
            return out + torch.randn_like(out), out
        if interaction_type() is InteractionType.RANDOM:
            return torch.multinomial(out.softmax(-1), 1).squeeze(-1), out
        return out.argmax(-1), out


def make_env(name: str = "CartPole-v1", num_envs: int = 0, late: float = 0.0, mode="NextStep"):
    """One environment, or a vector of them; `late` says how slow the start is."""
    time.sleep(late)
    if not num_envs:
        return TimeLimit(gym.make(name).unwrapped, 40)
    made = [lambda: TimeLimit(gym.make(name).unwrapped, 40)] * num_envs
    return SyncVectorEnv(made, autoreset_mode=mode)


def single(name="CartPole-v1", num_envs=0, seed=3, **options):
    kwargs = {"name": name, "num_envs": num_envs}
    collector = Collector(
        make_env, Sampling(name), create_env_kwargs=kwargs, frames_per_batch=60, **options
    )
    if seed is not None:
        collector.set_seed(seed)
    return collector


def multi(name="CartPole-v1", num_envs=3, seed=3, late=(0.0, 0.0), **options):
    kwargs = [{"name": name, "num_envs": num_envs, "late": one} for one in late]
    options.setdefault("frames_per_batch", 120)
    collector = MultiSyncCollector(
        make_env, Sampling(name), create_env_kwargs=kwargs, num_workers=2, **options
    )
    if seed is not None:
        collector.set_seed(seed)
    return collector


def train(collector):
    """A step that depends on nothing but what came before it."""
    with torch.no_grad():
        for parameter in collector.policy.parameters():
            parameter.mul_(0.9)
    collector.update_policy_weights_()


def batches(collector, count, disturb=lambda: None):
    """So many batches, with training between them; the collector is shut down."""
    found = []
    with collector:
        for _ in range(count):
            found.append(collector.next())
            disturb()
            train(collector)
    return found


def assert_same(ones, others):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        differing = [
            key
            for key in one.keys(True, True)
            if key not in other.keys(True, True) or not torch.equal(one[key], other[key])
        ]
        assert same_bits(one, other), differing


@pytest.mark.parametrize(("make", "name"), [(single, "Pendulum-v1"), (multi, "CartPole-v1")])
def test_the_same_seed_gives_the_same_bits(make, name):
    assert_same(batches(make(name), 6), batches(make(name), 6))


@pytest.mark.parametrize("make", [single, multi])
def test_another_seed_or_none_gives_other_bits(make):
    found = [batches(make(seed=seed), 1)[0] for seed in (3, 4, None, None)]
    for one, other in itertools.combinations(found, 2):
        assert not torch.equal(one["observation"], other["observation"])
        assert not torch.equal(one["action"], other["action"])


@pytest.fixture(scope="module")
def by_fork_server():
    return batches(multi(), 4)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_start_method_of_workers_makes_no_difference(method, by_fork_server):
    assert_same(batches(multi(start_method=method), 4), by_fork_server)


def test_the_order_in_which_workers_start_makes_no_difference(by_fork_server):
    assert_same(batches(multi(late=(0.2, 0.0)), 4), by_fork_server)


def test_draws_and_calls_of_the_trainer_make_no_difference(by_fork_server):
    def disturb():
        torch.randn(100)
        np.random.random(100)
        collector.stats()
        collector.getattr_env("spec")
        collector.state_dict()
        with collector.pause():
            torch.randn(3)

    collector = multi()
    assert_same(batches(collector, 4, disturb), by_fork_server)


def test_a_collector_leaves_the_streams_of_its_process_alone():
    policy = Sampling()
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.randn(3), np.random.random(3)
    torch.manual_seed(0)
    np.random.seed(0)
    with Collector(make_env, policy, frames_per_batch=20) as collector:
        collector.next()
        collector.reset()
        collector.set_seed(9)
        collector.next()
        drawn = torch.randn(3), np.random.random(3)
    assert torch.equal(drawn[0], expected[0])
    assert (drawn[1] == expected[1]).all()


def test_draws_of_the_process_do_not_reach_a_collector():
    def disturb():
        torch.randn(5)

    assert_same(batches(single(), 4, disturb), batches(single(), 4))


def test_batches_are_pieces_of_one_stream_of_random_numbers():
    def collected(frames, count):
        with Collector(make_env, Sampling(), frames_per_batch=frames, seed=3) as collector:
            return torch.cat([collector.next()["action"] for _ in range(count)], 1)

    whole = collected(60, 1)
    assert torch.equal(whole, collected(30, 2))
    assert not torch.equal(whole[:, :30], whole[:, 30:])


class Fading(gym.Wrapper):
    """Shows or pays less from step to step, over all episodes."""

    def __init__(self, name):
        super().__init__(gym.make("CartPole-v1"))
        self.name, self.steps = name, np.zeros(1, np.float32)  # arrays are not compared

    def step(self, action):
        self.steps += 1
        observation, reward, *rest = self.env.step(action)
        if self.name == "reward":
            return observation, reward / self.steps[0], *rest
        return observation / self.steps, reward, *rest


@pytest.mark.parametrize("name", ["reward", "observation"])
def test_a_replay_that_leads_elsewhere_is_given_up(name):
    with Collector(lambda: Fading(name), Sampling(), frames_per_batch=97, seed=3) as first:
        assert not first.next()["next", "done"][0, -1]
        state = first.state_dict()
    with Collector(lambda: Fading(name), Sampling(), frames_per_batch=97) as second:
        assert second.load_state_dict(state) is False


def test_an_episode_too_long_to_be_replayed_is_forgotten_and_starts_anew(monkeypatch):
    monkeypatch.setattr("collectors.rollout.episode_replay.LONGEST", 25)

    def make():
        return gym.make("Pendulum-v1").unwrapped  # whose episode never ends

    with Collector(make, Sampling("Pendulum-v1"), frames_per_batch=20) as collector:
        collector.next()
        assert collector.load_state_dict(collector.state_dict()) is True
        collector.next()
        state = collector.state_dict()
        assert state["workers"][0]["environments"]["members"] == [{}]
        assert collector.load_state_dict(state) is False


def test_workers_and_their_environments_have_streams_of_their_own():
    (batch,) = batches(multi(), 1)
    starts = batch["observation"][:, 0]
    assert len(torch.unique(starts, dim=0)) == 6
    assert len(torch.unique(batch["action"], dim=0)) == 6


def test_a_static_seed_is_everybodys():
    collector = multi(seed=None)
    with collector:
        collector.set_seed(5, static_seed=True)
        batch = collector.next()
    starts = batch["observation"][:, 0]
    assert len(torch.unique(starts, dim=0)) == 1
    expected, _ = make_env().reset(seed=5)
    assert torch.equal(starts[0], torch.from_numpy(expected))


def test_the_next_seed_is_another_and_always_the_same():
    with single() as collector:
        following = collector.set_seed(11)
        assert following == collector.set_seed(11) != 11
        assert collector.set_seed(12) != following


@pytest.mark.parametrize("seed", [-1, 1.5, "3", True, None])
def test_seeds_that_are_no_whole_numbers_are_refused(seed):
    with single() as collector, pytest.raises(ValueError, match="seed"):
        collector.set_seed(seed)


def interrupted(make, after, count, **options):
    """Batches of one collector, then of another that goes on with its state."""
    first = make(**options)
    found = []
    with first:
        for _ in range(after):
            found.append(first.next())
            train(first)
        state = first.state_dict()
        weights = {k: v.clone() for k, v in first.policy.state_dict().items()}
    second = make(**{**options, "seed": None})
    second.policy.load_state_dict(weights)
    second.update_policy_weights_()
    exact = second.load_state_dict(state)
    return exact, found + batches(second, count - after)


@pytest.mark.parametrize(
    ("make", "name", "num_envs", "after"),
    [
        (single, "CartPole-v1", 0, 1),
        (single, "Pendulum-v1", 3, 4),
        (single, "CartPole-v1", 3, 0),
        (multi, "CartPole-v1", 3, 4),
        (multi, "Pendulum-v1", 0, 1),
        (multi, "CartPole-v1", 3, 0),
    ],
)
def test_a_collector_that_goes_on_was_never_interrupted(make, name, num_envs, after):
    options = {"name": name, "num_envs": num_envs}
    exact, found = interrupted(make, after, 7, **options)
    assert exact is True
    assert_same(found, batches(make(**options), 7))


@pytest.mark.parametrize("make", [single, multi])
def test_a_collector_that_starts_each_batch_with_new_episodes_goes_on_alike(make):
    options = {"num_envs": 3, "reset_at_each_iter": True}
    exact, found = interrupted(make, 2, 5, **options)
    assert exact is True
    assert_same(found, batches(make(**options), 5))


@pytest.mark.parametrize("after", [1, 3])
def test_going_on_amid_random_frames(after):
    options = {"init_random_frames": 100, "num_envs": 3}
    exact, found = interrupted(single, after, 5, **options)
    assert exact is True
    assert_same(found, batches(single(**options), 5))


def test_a_state_can_be_taken_again_from_where_it_was_loaded():
    with single() as collector:
        collector.next()
        state = collector.state_dict()
        one = collector.next()
        assert collector.load_state_dict(state)
        again = collector.state_dict()
        assert_same([collector.next()], [one])
        assert collector.load_state_dict(again)
        assert_same([collector.next()], [one])


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_a_vector_goes_on_in_every_mode_and_may_be_reset_in_part_at_once(mode):
    def sampling():
        told = {"num_envs": 3, "mode": mode}
        return Collector(make_env, Sampling(), create_env_kwargs=told, frames_per_batch=60)

    with sampling() as first:
        first.set_seed(3)
        for _ in range(3):
            first.next()
        state = first.state_dict()
        first.reset([1])
        expected = first.next()
    with sampling() as second:
        assert second.load_state_dict(state)
        second.reset([1])
        assert_same([second.next()], [expected])


def normalised(**kwargs):
    return NormalizeObservation(TimeLimit(gym.make("CartPole-v1").unwrapped, 40))


def scaled(**kwargs):
    return NormalizeReward(TimeLimit(gym.make("CartPole-v1").unwrapped, 40))


def between_episodes(**kwargs):
    """A batch of 60 frames ends with an episode, so that there is nothing to replay."""
    return NormalizeReward(TimeLimit(gym.make("CartPole-v1").unwrapped, 3))


def native(**kwargs):
    return gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")


@pytest.mark.parametrize("make_env", [normalised, scaled, between_episodes, native])
def test_environments_that_cannot_be_brought_back_start_anew_and_it_says_so(make_env):
    with Collector(make_env, Sampling(), frames_per_batch=60) as first:
        for _ in range(3):
            last = first.next()
        state = first.state_dict()
    with Collector(make_env, Sampling(), frames_per_batch=60) as second:
        assert second.load_state_dict(state) is False
        batch = second.next()
    assert batch["is_init"][:, 0].all()
    fresh = batch["collector", "traj_ids"][batch["collector", "mask"]]
    assert fresh.min() > last["collector", "traj_ids"].max()


def test_an_episode_that_takes_another_course_is_not_stepped_past_its_end():
    with Collector(CodeEnv, CodePolicy(), frames_per_batch=4) as first:
        first.next()  # an episode of one step, and three of its second
        state = first.state_dict()
    with Collector(CodeEnv, CodePolicy(), frames_per_batch=4) as second:
        assert second.load_state_dict(state) is False
        assert second.next()["is_init"][0, 0]


def test_the_state_of_another_kind_of_collector_is_refused():
    with single() as collector:
        state = collector.state_dict()
        for name, value, mine in (
            ("kind", "MultiSyncCollector", "'Collector'"),
            ("num_workers", 2, "1"),
        ):
            with pytest.raises(ValueError, match=f"{name}={value!r}, but this one has {mine}"):
                collector.load_state_dict(state | {name: value})


def test_versions_and_frames_go_on():
    with single() as first:
        for _ in range(3):
            first.next()
            train(first)
        state = first.state_dict()
    with single(seed=None) as second:
        second.load_state_dict(state)
        assert second.policy_version == 3
        assert second.frames == 180
        assert (second.next()["policy_version"] == 3).all()


def coding(make_env, kwargs):
    """Workers that run ahead, of environments whose frames say where they come from."""
    return MultiAsyncCollector(
        make_env,
        CodePolicy(),
        num_workers=2,
        frames_per_batch=30,
        create_env_kwargs=kwargs,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme(sync=False)},
    )


@pytest.mark.parametrize(("found", "made", "dropped"), [("resting", 60, 60), ("at work", 40, 41)])
def test_an_async_collector_goes_on_with_whole_episodes_of_its_own(found, made, dropped, tmp_path):
    before, after = Checker([1, 1]), Checker([1, 1])
    with coding(CodeEnv, [{"worker": 0}, {"worker": 1}]) as first:
        for _ in range(5):
            before.check(first.next())
            with torch.no_grad():
                first.policy.number += 1
            first.update_policy_weights_()
        state = first.state_dict()
    gates = [Gate(tmp_path / str(worker)) for worker in range(2)]
    with coding(GatedEnv, [{"worker": i, "gate": gates[i].path} for i in range(2)]) as second:
        for gate in gates:
            gate.let(made)
        wait_until(lambda: second.stats()["in_flight"] == 2 * made)
        second.policy.load_state_dict(first.policy.state_dict())
        second.update_policy_weights_()
        counters = [handle.counters.values for handle in second.pool.handles]
        heard = [(values, values[MESSAGES]) for values in counters]

        def open_when_told():
            wait_until(lambda: all(values[MESSAGES] > number for values, number in heard))
            for gate in gates:
                gate.let(10_000)

        thread = threading.Thread(target=open_when_told)
        thread.start()
        assert second.load_state_dict(state) is False  # these are new episodes
        thread.join(30.0)
        assert second.policy_version == 5
        assert second.frames == before.counts["frames"] == 5 * 30
        after.ids |= before.ids  # none of them may come again
        for _ in range(8):
            batch = second.next()
            after.check(batch)  # also that it starts an episode, or goes on from the one before
            assert (batch["policy_version"] == 5).all()
            assert all_accounted_for(second.stats())
        stats = second.stats()
        assert stats["delivered"] == after.counts["frames"] == second.frames - 5 * 30
        for worker in stats["workers"]:  # what was made with the weights of before
            assert worker["dropped"] == dropped or not worker["delivered"]
    for gate in gates:
        gate.close()
