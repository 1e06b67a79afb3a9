from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from contextlib import closing, suppress

import gymnasium as gym
import numpy as np
import psutil
import pytest
import yaml
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from harness.config.compose import CONF
from harness.environments.factory import (
    EXTRAS,
    PACKAGES,
    WRAPPERS_NEED,
    EnvFactory,
    check_environment,
)
from harness.options.base import build
from harness.options.run import EnvConfig


def made(**config):
    """What a factory gives after a journey to another process."""
    description = EnvConfig(**config)
    check_environment(description)
    return pickle.loads(pickle.dumps(EnvFactory(description)))()


def test_none_is_one_plain_environment():
    with closing(made(vectorisation="none", num_envs=1)) as env:
        assert isinstance(env, gym.Env)
        assert env.reset(seed=0)[0].shape == (4,)


@pytest.mark.parametrize("vectorisation", ["sync", "async"])
def test_a_vector_leaves_it_to_the_collector_to_reset_its_members(vectorisation):
    with closing(made(vectorisation=vectorisation, num_envs=2, max_episode_steps=1)) as envs:
        assert envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED
        envs.reset(seed=0)
        *_, truncated, _ = envs.step(np.array([0, 1]))
        assert truncated.all()


@pytest.mark.parametrize("vectorisation", ["sync", "async"])
def test_rewards_in_arrays_of_one_number_are_numbers_in_a_vector(vectorisation):
    wrappers = ["tests.harness.scored:Arrays"]
    with closing(made(vectorisation=vectorisation, num_envs=2, wrappers=wrappers)) as envs:
        envs.reset(seed=0)
        assert envs.step(np.array([0, 1]))[1].tolist() == [1.0, 1.0]


def test_a_native_vector_is_the_environments_own():
    with closing(made(vectorisation="native", num_envs=3, max_episode_steps=7)) as envs:
        assert isinstance(envs, VectorEnv)
        assert type(envs).__name__ == "CartPoleVectorEnv"
        assert (envs.num_envs, envs.max_episode_steps) == (3, 7)


def test_arguments_and_limits_reach_the_environment():
    config = {"kwargs": {"g": 3.0}, "max_episode_steps": 5}
    with closing(made(id="Pendulum-v1", vectorisation="none", num_envs=1, **config)) as env:
        assert env.unwrapped.g == 3.0
        env.reset(seed=0)
        assert [env.step(np.zeros(1))[3] for _ in range(5)] == [False] * 4 + [True]


def test_wrappers_go_on_in_the_order_of_their_names():
    wrappers = ["time_aware", {"frame_stack": {"stack_size": 3}}, "flatten_observation"]
    with closing(made(vectorisation="none", num_envs=1, wrappers=wrappers)) as env:
        assert env.observation_space.shape == (15,)


def test_a_native_vector_takes_those_wrappers_that_have_a_form_for_it():
    wrappers = [{"clip_reward": {"min_reward": 0.0, "max_reward": 0.5}}]
    with closing(made(vectorisation="native", num_envs=2, wrappers=wrappers)) as envs:
        envs.reset(seed=0)
        assert envs.step(np.array([0, 1]))[1].tolist() == [0.5, 0.5]


# -- actions out of bounds


class Echo(gym.Env):
    """Rewards an action with its first number."""

    observation_space = Discrete(2)
    action_space = Box(-1, 2, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, float(action[0]), False, False, {}


class EchoVector(VectorEnv):
    """The same, several at once."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs, max_episode_steps=None, render_mode=None):
        self.num_envs = num_envs
        self.single_action_space = Echo.action_space
        self.action_space = gym.vector.utils.batch_space(Echo.action_space, num_envs)
        self.observation_space = self.single_observation_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.num_envs), {}

    def step(self, actions):
        no = np.zeros(self.num_envs, bool)
        return np.zeros(self.num_envs), actions[:, 0], no, no, {}


@pytest.fixture
def echo():
    gym.register("Echo-v0", Echo, vector_entry_point=EchoVector)
    yield "Echo-v0"
    del gym.registry["Echo-v0"]


def test_actions_are_clipped_to_bounds_that_go_on_being_stated(echo):
    with closing(made(id=echo, vectorisation="none", num_envs=1)) as env:
        assert env.action_space == Echo.action_space
        env.reset()
        assert [env.step(np.full(2, x))[1] for x in (-9.0, 0.5, 9.0)] == [-1.0, 0.5, 2.0]


def test_actions_are_clipped_in_a_native_vector_too(echo):
    with closing(made(id=echo, vectorisation="native", num_envs=3)) as envs:
        assert envs.single_action_space == Echo.action_space
        envs.reset()
        actions = np.float32([[-9, 0], [0.5, 0], [9, 0]])
        assert envs.step(actions)[1].tolist() == [-1.0, 0.5, 2.0]


# -- what is refused


def check(config: dict) -> None:
    options = build(EnvConfig, config, "env")
    check_environment(options)
    options.check(None)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"id": "CartPol-v1"}, "env.id=CartPol-v1: .*did you mean CartPole-v1"),
        ({"id": "LunarLander-v2"}, "did you mean LunarLander-v3"),
        ({"id": "no_such_module:Thing-v0"}, "env.id=no_such_module:Thing-v0: "),
        ({"vectorisation": "nativ"}, "did you mean native"),
        ({"vectorisation": "none", "num_envs": 8}, "env.num_envs=8.*expected 1"),
        ({"num_envs": 0}, "env.num_envs=0: expected a whole number .1 to 1000000"),
        ({"max_episode_steps": 0}, "env.max_episode_steps=0: "),
        ({"id": "Pendulum-v1", "vectorisation": "native"}, "no vector form of its own"),
        ({"wrappers": ["frame_stak"]}, "did you mean frame_stack"),
        ({"wrappers": [{"resize": {}, "atari": {}}]}, "expected a name or"),
        ({"wrappers": ["time_aware"], "vectorisation": "native"}, "cannot wrap a native vector"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_in_one_line(config, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        check(config)
    assert "\n" not in str(caught.value)


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(EXTRAS, "gymnasium.envs.mujoco", ("no_such_module", "mujoco"))
    with pytest.raises(ValueError, match=r"needs no_such_module.*pip install -e '.\[mujoco\]'"):
        check_environment(EnvConfig(id="HalfCheetah-v5"))


@pytest.mark.parametrize("env_id", ["MinAtar/Breakout-v1", "minatar:MinAtar/Breakout-v1"])
def test_the_extra_of_a_known_package_is_named_too(env_id, monkeypatch):
    missing = PACKAGES["MinAtar/"]._replace(needs=("no_such_module",))
    monkeypatch.setitem(PACKAGES, "MinAtar/", missing)
    complaint = rf"env.id={env_id} needs no_such_module; .*pip install -e '.\[minatar\]'"
    with pytest.raises(ValueError, match=complaint):
        check_environment(EnvConfig(id=env_id))


def test_a_wrapper_that_lacks_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(WRAPPERS_NEED, "resize", ("no_such_module", "atari"))
    with pytest.raises(ValueError, match=r"'resize' needs no_such_module; .*'.\[atari\]'"):
        check_environment(EnvConfig(wrappers=[{"resize": {"shape": [84, 84]}}]))


def test_an_error_calls_a_factory_by_what_it_makes():
    assert str(EnvFactory(EnvConfig(id="Acrobot-v1"))) == "env.id=Acrobot-v1"


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that ends them")
def test_a_hanging_member_does_not_outlive_the_process_that_made_its_vector(tmp_path):
    program = """
import os, signal, sys
from pathlib import Path
from harness.environments.factory import EnvFactory
from harness.options.run import EnvConfig
kwargs = {"where": "reset", "what": "hang", "at": 1, "once": sys.argv[1], "continuous": False}
name = "benchmarks.chaos.environments:Trouble-v0"
config = EnvConfig(name, vectorisation="async", num_envs=1, kwargs=kwargs)
envs = EnvFactory(config)()
envs.reset_async(seed=0)
while not os.path.exists(sys.argv[1]):
    pass
Path(sys.argv[2]).write_text(str(envs.processes[0].pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    noted = tmp_path / "member"
    command = [sys.executable, "-c", program, str(tmp_path / "once"), str(noted)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):  # it may have gone already
        member = psutil.Process(int(noted.read_text()))
        try:
            member.wait(timeout=10)
        finally:
            member.kill()


# -- other packages, where they are installed


def described(name: str, **changes) -> EnvConfig:
    """The environment of a file in conf/env, as a run composes it."""
    options = yaml.safe_load((CONF / "env" / f"{name}.yaml").read_text())
    del options["defaults"]
    return EnvConfig(**{"num_envs": 1, "vectorisation": "none", **options, **changes})


@pytest.mark.parametrize(
    ("name", "package", "shape", "dtype"),
    [
        ("atari", "ale_py", (4, 84, 84), np.uint8),
        ("minatar", "minatar", (10, 10, 4), np.bool_),
        ("minigrid", "minigrid", (7, 7, 20), np.bool_),
        ("dm_control", "dm_control", (5,), np.float64),
        ("lunarlander", "Box2D", (8,), np.float32),
        ("ant", "mujoco", (105,), np.float64),
        ("humanoid", "mujoco", (348,), np.float64),
        ("swimmer", "mujoco", (8,), np.float64),
        ("reacher", "mujoco", (10,), np.float64),
        ("pusher", "mujoco", (23,), np.float64),
        ("inverted_pendulum", "mujoco", (4,), np.float64),
        ("inverted_double_pendulum", "mujoco", (9,), np.float64),
    ],
)
def test_an_environments_config_makes_it(name, package, shape, dtype):
    pytest.importorskip(package)
    config = described(name)
    check_environment(config)
    with closing(pickle.loads(pickle.dumps(EnvFactory(config)))()) as env:
        assert (env.observation_space.shape, env.observation_space.dtype) == (shape, dtype)
        observation, _ = env.reset(seed=0)
        env.action_space.seed(0)
        for _ in range(20):
            assert observation.shape == shape
            observation, *_ = env.step(env.action_space.sample())


@pytest.mark.parametrize("game", ["Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"])
def test_each_game_of_minatar_is_made_by_its_id(game):
    pytest.importorskip("minatar")
    config = described("minatar", id=f"MinAtar/{game}-v1")
    check_environment(config)
    with closing(EnvFactory(config)()) as env:
        assert env.observation_space.shape[:2] == (10, 10)


@pytest.mark.parametrize(
    ("kwargs", "skipped"),
    [({}, 1), ({"frameskip": 1}, 1), ({"repeat_action_probability": 0.0}, 1)],
)
def test_the_atari_wrapper_alone_skips_frames(kwargs, skipped):
    pytest.importorskip("ale_py")
    for env_id in ("ALE/Pong-v5", "ale_py:ALE/Pong-v5"):
        config = described("atari", id=env_id, wrappers=["atari"], kwargs=kwargs)
        check_environment(config)
        with closing(EnvFactory(config)()) as env:
            assert env.unwrapped._frameskip == skipped
            env.reset(seed=0)
            before = env.unwrapped.ale.getEpisodeFrameNumber()
            env.step(0)
            assert env.unwrapped.ale.getEpisodeFrameNumber() == before + 4


def test_frames_are_not_skipped_twice():
    pytest.importorskip("ale_py")
    with pytest.raises(ValueError, match=r"env.kwargs.frameskip=4: the wrapper atari skips"):
        check_environment(described("atari", kwargs={"frameskip": 4}))
    own = described("atari", wrappers=[{"atari": {"frame_skip": 1}}], kwargs={"frameskip": 4})
    check_environment(own)
    with closing(EnvFactory(own)()) as env:
        assert env.unwrapped._frameskip == 4


def test_a_life_lost_ends_no_game():
    pytest.importorskip("ale_py")
    wrappers = ["atari", "episodic_life", "fire_reset"]
    config = described("atari", id="ALE/Breakout-v5", wrappers=wrappers)
    with closing(EnvFactory(config)()) as env:
        env.reset(seed=0)
        first, lives = env.counter.number, []
        while not env.counter.over:
            env.action_space.seed(len(lives))
            *_, terminated, _, _ = env.step(env.action_space.sample())
            if terminated:
                lives.append(env.unwrapped.ale.lives())
                if not env.counter.over:
                    env.reset()
        assert lives == [4, 3, 2, 1, 0]
        assert env.counter.number == first
        env.reset()
        assert env.counter.number > first
        assert env.unwrapped.ale.lives() == 5
