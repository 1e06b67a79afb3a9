"""A recorded schedule, followed in one process, gives the batches of the asynchronous run."""

from __future__ import annotations

import os
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import nn

from collectors import MultiAsyncCollector, RecordedSchedule, SimulatedCollector
from collectors.schedule.recording import EndOfSchedule
from sync import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SimulatedWeightSyncScheme,
    WorkerDied,
    WorkerRaised,
)

STEPS = 24


class Chance(nn.Module):
    """Acts at random; its outputs tell the weights that it acted with, and what was drawn."""

    out_keys = ("action", "weight", "drawn")

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, observation):
        logits = self.layer(observation)
        drawn = torch.rand(len(observation)) + np.random.rand()
        action = torch.distributions.Categorical(logits=logits).sample()
        return action, self.layer.weight.sum().expand(len(observation)).clone(), drawn


class Remembering(Chance):
    """The same with a state, which episodes start at zero."""

    in_keys = ("observation", "state")
    out_keys = ("action", "weight", "drawn", ("next", "state"))

    def forward(self, observation, state):
        outputs = super().forward(observation)
        before = torch.zeros(len(observation), 4) if state is None else state
        return *outputs, torch.tanh(before + observation + self.layer.bias.sum())


class Slow(gym.Wrapper):
    """CartPole whose steps take a while, longer in some workers; and that may fail or die."""

    def __init__(self, env, worker_idx, dies=False):
        super().__init__(env)
        self.worker, self.dies, self.steps = worker_idx, dies, 0

    def step(self, action):
        time.sleep(0.0004 * (1 + self.worker))
        self.steps += 1
        if self.dies and self.worker == 1 and self.steps == 60:
            raise ArithmeticError("struck")
        return super().step(action)


def one(worker_idx=None):
    return Slow(gym.make("CartPole-v1"), worker_idx)


def two(worker_idx=None):
    return SyncVectorEnv([lambda: Slow(gym.make("CartPole-v1"), worker_idx)] * 2)


def dying(worker_idx=None):
    return Slow(gym.make("CartPole-v1"), worker_idx, dies=True)


def change(policy, number):
    """A step of a learner: weights that follow from the number of the step."""
    torch.manual_seed(number)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def collect(collector, policy, batches, of_worker_1=0):
    """So many batches, and until so many are of worker 1."""
    found = []
    with collector:
        while len(found) < batches or of_worker_1 > 0:
            found.append(collector.next().clone())
            of_worker_1 -= int(found[-1]["collector", "worker"][0, 0]) == 1
            change(policy, len(found))
            collector.update_policy_weights_()
    return found


def record(
    tmp_path, make_policy, make_env, scheme, *, batches=12, num_envs=1, of_worker_1=0, **options
):
    torch.manual_seed(0)
    policy, path = make_policy(), str(tmp_path / "schedule.jsonl")
    collector = MultiAsyncCollector(
        make_env,
        policy,
        num_workers=3,
        frames_per_batch=STEPS * num_envs,
        seed=5,
        weight_sync_schemes={"policy": scheme},
        record_schedule=path,
        **options,
    )
    return path, collect(collector, policy, batches, of_worker_1)


def replay(path, make_policy, make_env, *, batches=12, num_envs=1, wire="float32", **options):
    torch.manual_seed(0)
    policy, schedule = make_policy(), RecordedSchedule(path)
    for name in ("max_lag", "on_worker_failure", "batches_ahead"):
        options.pop(name, None)
    collector = SimulatedCollector(
        make_env,
        policy,
        schedule=schedule,
        num_workers=schedule.header.num_workers,
        frames_per_batch=STEPS * num_envs,
        seed=schedule.header.seed,
        weight_sync_schemes={"policy": SimulatedWeightSyncScheme(wire=wire)},
        **options,
    )
    return collect(collector, policy, batches)


def check_same(recorded, replayed):
    assert len(recorded) == len(replayed)
    switches = 0
    for there, here in zip(recorded, replayed, strict=True):
        keys = sorted(map(str, there.keys(True, True)))
        assert keys == sorted(map(str, here.keys(True, True)))
        for key in there.keys(True, True):
            assert torch.equal(there[key], here[key]), key
        switches += len(there["policy_version"].unique()) > 1
    return switches


# Where the name does not say otherwise, weights are applied at the next step.
CASES = {
    "batch": (Chance, one, 1, {"apply_at": "batch"}),
    "episode": (Chance, one, 1, {"apply_at": "episode"}),
    "state": (Remembering, one, 1, {}),
    "state, zeroed": (Remembering, two, 2, {"state_on_update": "zero"}),
    "state, recomputed": (Remembering, two, 2, {"state_on_update": "recompute"}),
    "random first": (Chance, one, 1, {"init_random_frames": 100}),
    "waiting": (Chance, one, 1, {"max_lag": 2}),
    "one ahead": (Chance, one, 1, {"batches_ahead": 1}),
    "resets": (Chance, one, 1, {"reset_at_each_iter": True}),
    "restarts": (Chance, dying, 1, {"on_worker_failure": "restart"}),
    "cut": (Chance, two, 2, {"max_frames_per_traj": 7}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replay_gives_the_recorded_batches(tmp_path, case):
    make_policy, make_env, num_envs, options = CASES[case]
    given = {"num_envs": num_envs, **options}
    # It dies in its third batch, so that of three one is its successor's.
    wanted = 3 if case == "restarts" else 0
    scheme = SharedMemWeightSyncScheme()
    path, recorded = record(tmp_path, make_policy, make_env, scheme, of_worker_1=wanted, **given)
    replayed = replay(path, make_policy, make_env, batches=len(recorded), **given)
    switches = check_same(recorded, replayed)
    if case in ("one ahead", "state", "cut"):
        assert switches > 0, "no batch of this run says anything"
    if case == "restarts":
        assert max(plan.generation for plan in RecordedSchedule(path).batches) > 0


class Told(ArithmeticError):
    """What an environment raises; the message says what led to it."""


class Failing(Slow):
    def step(self, action):
        outcome = super().step(action)
        if self.worker == 1 and self.steps == 77:
            raise Told(f"at {outcome[0].tolist()}")
        return outcome


def failing(worker_idx=None):
    return Failing(gym.make("CartPole-v1"), worker_idx)


@pytest.mark.parametrize("apply_at", ["step", "batch", "episode"])
def test_a_worker_that_raised_raises_again(tmp_path, apply_at):
    with pytest.raises(WorkerRaised, match="Told: at ") as there:
        record(
            *(tmp_path, Chance, failing, SharedMemWeightSyncScheme()),
            batches=1000,
            apply_at=apply_at,
        )
    path = tmp_path / "schedule.jsonl"
    last = RecordedSchedule(path).batches[-1]
    assert (last.worker, last.lost) == (1, True)
    with pytest.raises(Told) as here:
        replay(path, Chance, failing, batches=1000)
    assert f"Told: {here.value}" in str(there.value)
    assert "raised by virtual worker 1, generation 0" in "".join(here.value.__notes__)


def test_a_worker_that_was_killed_ends_the_replay(tmp_path):
    def deadly(worker_idx=None):
        env = Failing(gym.make("CartPole-v1"), worker_idx)
        env.step = lambda action: os.kill(os.getpid(), 9) if worker_idx else Slow.step(env, action)
        return env

    with pytest.raises(WorkerDied):
        record(tmp_path, Chance, deadly, SharedMemWeightSyncScheme(), batches=1000)
    with pytest.raises(EndOfSchedule):
        replay(tmp_path / "schedule.jsonl", Chance, one, batches=1000)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8"])
def test_workers_act_with_the_weights_that_travelled(tmp_path, wire):
    scheme = MultiProcessWeightSyncScheme(wire=wire)
    path, recorded = record(tmp_path, Chance, one, scheme)
    assert check_same(recorded, replay(path, Chance, one, wire=wire)) > 0


def test_steps_in_which_all_environments_only_reset_are_recorded(tmp_path):
    def make(worker_idx=None):
        how = {"vectorization_mode": "vector_entry_point", "max_episode_steps": 3}
        return gym.make_vec("CartPole-v1", num_envs=2, **how)

    scheme = SharedMemWeightSyncScheme()
    path, recorded = record(tmp_path, Chance, make, scheme, num_envs=2)
    check_same(recorded, replay(path, Chance, make, num_envs=2))


@pytest.mark.parametrize("call", ["reset", "set_seed"])
def test_calls_that_a_recording_lacks_are_refused(tmp_path, call):
    arguments = {"reset": (), "set_seed": (7,)}[call]
    path = tmp_path / "schedule.jsonl"
    recording = {"num_workers": 1, "frames_per_batch": STEPS, "record_schedule": str(path)}
    with MultiAsyncCollector(one, Chance(), seed=5, **recording) as collector:
        collector.next()
        with pytest.raises(RuntimeError, match=rf"{call}\(\): .*record_schedule"):
            getattr(collector, call)(*arguments)
        collector.next()
    assert len(RecordedSchedule(path).batches) == 2


def test_a_collector_that_continues_a_saved_state_makes_no_recording_to_replay(tmp_path):
    recording = {"num_workers": 1, "frames_per_batch": STEPS, "seed": 5}
    with MultiAsyncCollector(one, Chance(), **recording) as collector:
        collector.next()
        state = collector.state_dict()
    path = tmp_path / "schedule.jsonl"
    with MultiAsyncCollector(one, Chance(), record_schedule=str(path), **recording) as collector:
        collector.load_state_dict(state)
        collector.next()
    with pytest.raises(ValueError, match="the run was resumed here"):
        RecordedSchedule(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames_per_batch": [12, 30]}, r"frames_per_batch=\[12, 30\]: .*record_schedule"),
        ({"create_env_fn": [one, two], "frames_per_batch": 24}, r"record_schedule: .*\[1, 2\]"),
    ],
)
def test_workers_of_a_recording_are_equal(tmp_path, options, message):
    path = tmp_path / "schedule.jsonl"
    given = {"create_env_fn": one, "policy": Chance(), "num_workers": 2, **options}
    with pytest.raises(ValueError, match=message):
        MultiAsyncCollector(record_schedule=str(path), **given)
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 6}, "seed=6: the recorded run had seed=5"),
        ({"create_env_fn": two, "frames_per_batch": 2 * STEPS}, "2 environments.*recorded.* 1"),
    ],
)
def test_a_replay_with_other_workers_than_the_recorded_ones_is_refused(tmp_path, options, message):
    path, _ = record(tmp_path, Chance, one, SharedMemWeightSyncScheme(), batches=1)
    given = {"create_env_fn": one, "policy": Chance(), "frames_per_batch": STEPS, "seed": 5}
    with pytest.raises(ValueError, match=message):
        SimulatedCollector(schedule=RecordedSchedule(path), num_workers=3, **{**given, **options})
