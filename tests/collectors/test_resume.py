"""Replaying episodes on resume is bounded in time, can be switched off, and rewrites no file."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import RecordVideo

from collectors import Collector, MultiSyncCollector
from sync.errors import WorkerTimeout
from tests.collectors.remote.support import make as make_remote
from tests.collectors.support import CodeEnv, CodePolicy, Gate, same_bits
from tests.collectors.troubled import PoolClock

STEPS = 20
TIMEOUT_S = 60.0


class Endless(CodeEnv):
    """One episode without an end, whose first steps may be slow or wait for a gate."""

    def __init__(self, slow: int = 0, gate: str = ""):
        super().__init__(endless=True)
        self.slow, self.gate = slow, gate
        self._fd = os.open(gate, os.O_RDWR) if gate else -1

    def step(self, action):
        if self.steps < self.slow:
            time.sleep(0.15)
        if self.gate:
            Path(f"{self.gate}-{os.getpid()}").touch()
            os.read(self._fd, 1)
        return super().step(action)


def single(create_env_fn=Endless, **options):
    return Collector(create_env_fn, CodePolicy(), frames_per_batch=STEPS, **options)


def multi(create_env_fn=Endless, **options):
    return MultiSyncCollector(
        create_env_fn,
        CodePolicy(),
        num_workers=2,
        frames_per_batch=2 * STEPS,
        timeout=TIMEOUT_S,
        **options,
    )


def hosts(create_env_fn=Endless, **options):
    options |= {"frames_per_batch": 2 * STEPS, "timeout": TIMEOUT_S}
    return make_remote("distributed", create_env_fn, CodePolicy(), **options)


def interrupted(make, **options):
    """The state of a collector after one batch, and the batch that follows."""
    with make(**options) as first:
        first.next()
        return first.state_dict(), first.next()


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


def both_replay(gate: Gate) -> bool:
    return len(list(gate.folder.glob("gate-*"))) == 2


@pytest.mark.parametrize("make", [multi, hosts])
def test_a_replay_may_take_longer_than_a_worker_may_be_silent(make, gate, monkeypatch):
    clock = PoolClock(monkeypatch)

    def open_gate():
        clock.await_look()
        gate.let(1000)

    state, expected = interrupted(make)
    with make(create_env_kwargs={"gate": gate.path}) as second:
        with clock.put_forward(3 * TIMEOUT_S, lambda: both_replay(gate), open_gate):
            assert second.load_state_dict(state) is True
        assert same_bits(second.next(), expected)


@pytest.mark.parametrize("make", [single, multi, hosts])
def test_a_replay_that_takes_too_long_is_given_up_for_new_episodes(make):
    state, _ = interrupted(make)
    with make(create_env_kwargs={"slow": STEPS}, resume_timeout=0.3) as second:
        assert second.load_state_dict(state) is False
        assert second.next()["is_init"][:, 0].all()
        assert second.stats()["restarts"] == 0


def test_a_replay_that_hangs_is_a_worker_that_hangs(gate, monkeypatch):
    clock = PoolClock(monkeypatch)
    state, _ = interrupted(multi)
    kwargs = {"gate": gate.path}
    with (
        pytest.raises(WorkerTimeout, match="replaying episodes"),
        multi(create_env_kwargs=kwargs, resume_timeout=TIMEOUT_S) as second,
        clock.put_forward(3 * TIMEOUT_S, lambda: both_replay(gate)),
    ):
        second.load_state_dict(state)


@pytest.mark.parametrize("make", [single, hosts])
def test_without_resume_episodes_nothing_is_recorded_and_new_episodes_start(make):
    state, _ = interrupted(make, resume_episodes=False)
    assert "'members': []" in str(state["workers"])
    with make(resume_episodes=False) as second:
        assert second.load_state_dict(state) is False
        assert second.next()["is_init"][:, 0].all()


class Rendered(CodeEnv):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self):
        super().__init__(endless=True)
        self.render_mode = "rgb_array"

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)


class Video(RecordVideo):
    """Gymnasium's recorder, without an encoder."""

    def stop_recording(self):
        path = Path(self.video_folder) / f"{self._video_name}.npy"
        np.save(path, np.stack(self.recorded_frames))
        self.recorded_frames, self.recording = [], False


class Log(gym.Wrapper):
    """A user's own wrapper, which says that it writes files."""

    writes_files = True

    def __init__(self, env, folder):
        super().__init__(env)
        self.folder = Path(folder)
        self.folder.mkdir()

    def step(self, action):
        with (self.folder / "steps.txt").open("a") as file:
            file.write(f"{action}\n")
        return self.env.step(action)


def recorded(folder):
    return Video(Rendered(), folder, episode_trigger=lambda _: True, video_length=3)


def logged(folder):
    return gym.wrappers.TimeLimit(Log(Endless(), folder), 1000)


def vector(folder):
    return gym.vector.SyncVectorEnv([lambda: recorded(folder)])


@pytest.mark.parametrize("make_env", [recorded, logged, vector])
def test_a_resumed_collector_writes_no_file_again(make_env, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", ModuleType("moviepy"))
    state, _ = interrupted(
        single, create_env_fn=make_env, create_env_kwargs={"folder": tmp_path / "first"}
    )
    assert list(tmp_path.joinpath("first").iterdir())
    kwargs = {"folder": tmp_path / "second"}
    with single(create_env_fn=make_env, create_env_kwargs=kwargs) as second:
        assert second.load_state_dict(state) is False
        assert not list(tmp_path.joinpath("second").iterdir())
        assert second.next()["is_init"][0, 0]


class Counting(gym.vector.VectorEnv):
    """A vector that resets itself; observations count steps and episodes."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self):
        self.num_envs = 2
        self.single_observation_space = Box(0, 99, (2,), np.float32)
        self.single_action_space = Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, 2)
        self.action_space = batch_space(self.single_action_space, 2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.counts = np.zeros((2, 2), np.float32)
        return self.counts.copy(), {}

    def step(self, actions):
        self.counts[:, 0] += 1
        ended = self.counts[:, 0] >= (3, 5)
        info = {"final_obs": self.counts.copy()} if ended.any() else {}
        self.counts[ended] = np.stack([np.zeros(ended.sum()), self.counts[ended, 1] + 1], axis=1)
        return self.counts.copy(), np.zeros(2), ended, np.zeros(2, bool), info

    def state_dict(self):
        return {"counts": self.counts.copy()}

    def load_state_dict(self, state):
        self.counts = state["counts"]


class Still(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        return torch.zeros(len(observation), dtype=torch.int64)


class Doubling(gym.vector.VectorWrapper):
    def reset(self, **options):
        observations, info = super().reset(**options)
        return observations * 2, info


@pytest.mark.parametrize("collector", [Collector, MultiSyncCollector])
def test_a_vector_that_saves_itself_goes_on_within_its_episodes(collector):
    def make(create_env_fn=Counting):
        workers = {} if collector is Collector else {"num_workers": 2}
        return collector(create_env_fn, Still(), frames_per_batch=4 * STEPS, **workers)

    state, following = interrupted(make)
    with make() as second:
        assert second.load_state_dict(state)
        assert same_bits(second.next(), following)


def test_a_vector_that_saves_itself_starts_anew_in_a_wrapper_that_might_not():
    def make():
        return Collector(lambda: Doubling(Counting()), Still(), frames_per_batch=STEPS)

    state, _ = interrupted(make)
    assert state["workers"][0]["environments"]["own"] is None
    with make() as second:
        assert not second.load_state_dict(state)
