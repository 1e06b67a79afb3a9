"""What a policy keeps beside its weights is each worker's own, is replayed, and is resumed."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from collectors import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RecordedSchedule,
    SimulatedCollector,
)
from collectors.rollout.saved_attributes import restored, saved

STEPS = 25


class Ornstein:
    def __init__(self) -> None:
        self.value = np.zeros(1)

    def step(self) -> float:
        self.value = 0.9 * self.value + 0.1
        return float(self.value[0])


class Restless(nn.Module):
    """Acts by all that it keeps, of which no two calls have the same."""

    in_keys, out_keys = ("observation",), ("action",)

    def __init__(self, *extra: Any):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls, self.noise = 0, None
        self.generators = (torch.Generator(), np.random.default_rng(1))
        self.older_generators = {"numpy": np.random.RandomState(2), "python": random.Random(3)}
        self.history: deque[float] = deque([0.0], maxlen=3)
        self.largest: dict[Any, Any] = {}
        self.process = Ornstein()
        self.of_numpy = np.float32(0.1)
        self.extra = extra

    def forward(self, x):
        self.calls += 1
        torchs, numpys = self.generators
        drawn = torch.rand((), generator=torchs) + numpys.random()
        drawn += self.older_generators["numpy"].random() + self.older_generators["python"].random()
        before = torch.zeros(()) if self.noise is None else self.noise
        self.noise = 0.5 * before + drawn
        self.of_numpy *= np.float32(0.9)
        self.history.append(float(self.noise) + float(self.of_numpy))
        for place, value in enumerate(self.history):
            self.largest[place] = max(value, self.largest.get(place, 0.0))
        for one in self.extra:
            self.history.append(float(next(one)))
        kept = sum(self.history) + sum(self.largest.values()) + self.process.step()
        return self.layer(x).tanh() + 0.01 * kept + 0.001 * self.calls


class Writing(nn.Module):
    """Writes to its buffer, in place or anew."""

    in_keys, out_keys = ("observation",), ("action",)

    def __init__(self, in_place: bool):
        super().__init__()
        self.layer, self.in_place = nn.Linear(3, 1), in_place
        self.register_buffer("level", torch.zeros(1))

    def forward(self, x):
        if self.in_place:
            self.level += 0.01
        else:
            self.level = self.level + 0.01
        return self.layer(x).tanh() + self.level


def make():
    return gym.make("Pendulum-v1")


def actions(collector, batches, update_at=()):
    result = []
    for number in range(batches):
        result.append(collector.next()["action"].clone())
        if number in update_at:
            collector.update_policy_weights_()
    return torch.cat(result)


def plain(value):
    """Whether a checkpoint can hold it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


OPTIONS: dict[str, Any] = {"frames_per_batch": STEPS, "seed": 1}


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_resumed_policy_goes_on_with_all_that_it_kept(kind):
    options = {**OPTIONS, "num_workers": 1} if kind is MultiSyncCollector else OPTIONS
    torch.manual_seed(0)
    policy = Restless()
    with kind(make, policy, **options) as collector:
        actions(collector, 2)
        state = collector.state_dict()
        expected = actions(collector, 2)
    assert plain(state["workers"][0]["policy"])
    with kind(make, policy, **options) as collector:
        assert collector.load_state_dict(state)
        assert torch.equal(actions(collector, 2), expected)


@pytest.mark.parametrize("policy", [Restless(), Writing(True), Writing(False)])
def test_a_replay_acts_by_what_each_worker_kept(policy, tmp_path):
    options = {**OPTIONS, "num_workers": 2}
    file = str(tmp_path / "schedule.jsonl")
    with MultiAsyncCollector(make, policy, record_schedule=file, **options) as collector:
        recorded = actions(collector, 8, update_at=[4])
    schedule = RecordedSchedule(file)
    with SimulatedCollector(make, policy, schedule=schedule, **options) as collector:
        assert torch.equal(actions(collector, 8, update_at=[4]), recorded)


def test_a_virtual_worker_is_resumed_with_all_that_it_kept(tmp_path):
    options = {**OPTIONS, "num_workers": 2}
    file, policy = str(tmp_path / "schedule.jsonl"), Restless()
    with MultiAsyncCollector(make, policy, record_schedule=file, **options) as collector:
        recorded = actions(collector, 6)
    with SimulatedCollector(make, policy, schedule=RecordedSchedule(file), **options) as collector:
        actions(collector, 3)
        state = collector.state_dict()
    with SimulatedCollector(make, policy, schedule=RecordedSchedule(file), **options) as collector:
        assert collector.load_state_dict(state)
        assert torch.equal(actions(collector, 3), recorded[3:])


@pytest.mark.parametrize("policy", [lambda: Restless(itertools.count()), lambda: Writing(True)])
def test_what_cannot_be_saved_is_not_called_exact(policy):
    with Collector(make, policy(), **OPTIONS) as collector:
        actions(collector, 1)
        state = collector.state_dict()
    with (
        Collector(make, policy(), **OPTIONS) as collector,
        pytest.warns(UserWarning, match="does not go on exactly"),
    ):
        assert not collector.load_state_dict(state)


def test_what_does_not_change_is_not_saved():
    policy = Writing(True)
    policy.forward = lambda x: policy.layer(x).tanh()
    policy.sizes, policy.table = [1, 2], torch.ones(1000)
    with Collector(make, policy, **OPTIONS) as collector:
        actions(collector, 2)
        state = collector.state_dict()["workers"][0]["policy"]
    assert state == {"attributes": {}, "buffers_written": False}


class Curriculum(gym.Env):
    """The reward falls with the number of episodes so far."""

    observation_space = gym.spaces.Box(0, 100, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.episodes, self.t = 0, 0
        self.levels = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes, self.t = self.episodes + 1, 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        reward = 1.0 if self.t < 7 else 10.0 / self.episodes  # the episode at hand shows nothing
        return np.full(3, self.t, np.float32), reward, self.t >= 7, False, {}


@pytest.mark.parametrize("vector", [False, True])
def test_what_an_environment_keeps_across_episodes_is_named(vector):
    factory = (lambda: gym.vector.SyncVectorEnv([Curriculum] * 2)) if vector else Curriculum
    with Collector(factory, None, frames_per_batch=40, seed=1) as collector:
        collector.next()
        state = collector.state_dict()
    with Collector(factory, None, frames_per_batch=40, seed=1) as collector:
        with pytest.warns(UserWarning, match=r"attribute 'Curriculum\.episodes'$"):
            assert not collector.load_state_dict(state)
        assert not collector.next()["is_init"][0, 0]  # the episode goes on all the same


class Node:
    def __init__(self, following):
        self.left = self.right = following
        self.calls = 0


def test_objects_that_share_others_are_saved_once():
    first = None
    for _ in range(40):
        first = Node(first)
    policy = Writing(True)
    policy.nodes = first

    def forward(x):
        policy.nodes.left.calls += 1
        return policy.layer(x).tanh()

    policy.forward = forward
    with Collector(make, policy, weight_sync_schemes={}, **OPTIONS) as collector:
        actions(collector, 1)
        state = collector.state_dict()
        calls, policy.nodes.left.calls = policy.nodes.left.calls, 0
        assert collector.load_state_dict(state)
    assert policy.nodes.right.calls == calls > 0


def test_numbers_of_numpy_come_back_as_what_they_were():
    values = [np.float32(0.1), np.array(0.25), np.array([1, 2], np.int16), np.int64(7), True, "a"]
    for value in values:
        again = restored(None, saved(value))
        assert type(again) is type(value)
        assert np.array_equal(again, value)
        assert getattr(again, "dtype", None) == getattr(value, "dtype", None)


def test_a_container_that_is_in_two_places_is_saved_once():
    inner = [1, 2]
    state = saved({"one": inner, "other": inner})
    assert str(state).count("left out") == 1
    assert restored({"one": inner, "other": inner}, state) == {"one": [1, 2], "other": [1, 2]}
