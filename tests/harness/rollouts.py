"""Batches in the collectors' form, made by a plain loop over environments."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor

from harness.environments.factory import EnvFactory
from harness.options.run import EnvConfig


class Noise(gym.Env[Any, Any]):
    """Observations and rewards by chance; an episode ends by chance, in both ways."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]):
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action) or isinstance(self.action_space, spaces.Box)
        chance = self.np_random.random(2) < 0.1
        reward = float(self.np_random.normal())
        return self.observation_space.sample(), reward, bool(chance[0]), bool(chance[1]), {}


def noise(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], num_envs: int = 3
) -> PlainCollector:
    """A collector over environments that make no sense."""
    make = partial(Noise, deepcopy(observation_space), deepcopy(action_space))
    return PlainCollector(SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP))


def known(env_id: str, num_envs: int, seed: int = 0) -> PlainCollector:
    """A collector over environments of gymnasium."""
    make = EnvFactory(EnvConfig(id=env_id, num_envs=1, vectorisation="none"))
    envs = SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    return PlainCollector(envs, seed)


class PlainCollector:
    """Steps a vector of environments with a policy, and hands out batches [E, T]."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], seed: int = 0):
        self.envs = envs
        self.spaces = envs.single_observation_space, envs.single_action_space
        self.observation = torch.as_tensor(envs.reset(seed=seed)[0])
        self.num_envs = envs.num_envs
        self.is_init = torch.ones(self.num_envs, dtype=torch.bool)
        self.traj_ids = torch.arange(self.num_envs)
        self.state: dict[str, Tensor] | None = None
        self.returns = np.zeros(self.num_envs)
        self.finished: list[float] = []

    @torch.no_grad()
    def collect(self, policy: Any, num_steps: int, version: int = 0) -> TensorDict:
        if self.state is None:
            self.state = policy.initial_state(self.num_envs) if len(policy.in_keys) > 1 else {}
        with set_interaction_type(InteractionType.RANDOM):
            rows = [self._step(policy, version) for _ in range(num_steps)]
        return torch.stack(rows, dim=1)

    def _step(self, policy: Any, version: int) -> TensorDict:
        assert self.state is not None
        out = policy(self.observation, *self.state.values())
        out = dict(zip(policy.out_keys, out if isinstance(out, tuple) else (out,), strict=True))
        observation, reward, terminated, truncated, info = self.envs.step(out["action"].numpy())
        done = terminated | truncated
        true_next = observation.copy()
        for i in np.flatnonzero(done):
            true_next[i] = info["final_obs"][i]
        row = TensorDict(
            {
                "observation": self.observation,
                **self.state,
                "is_init": self.is_init,
                "policy_version": torch.full((self.num_envs,), version),
                "next": {
                    "observation": torch.as_tensor(true_next),
                    "reward": torch.as_tensor(reward, dtype=torch.float32),
                    "terminated": torch.as_tensor(terminated),
                    "truncated": torch.as_tensor(truncated),
                    "done": torch.as_tensor(done),
                },
                "collector": {
                    "traj_ids": self.traj_ids,
                    "worker": torch.zeros(self.num_envs, dtype=torch.int64),
                    "env": torch.arange(self.num_envs),
                    "mask": torch.ones(self.num_envs, dtype=torch.bool),
                },
            },
            batch_size=[self.num_envs],
        )
        for key, value in out.items():
            row[key] = value
        self._go_on(observation, reward, torch.as_tensor(done), out)
        return row.clone()

    def _go_on(self, observation: Any, reward: Any, done: Tensor, out: dict[Any, Tensor]) -> None:
        assert self.state is not None
        self.returns += reward
        self.finished += self.returns[done.numpy()].tolist()
        self.returns[done.numpy()] = 0
        self.observation = torch.as_tensor(observation.copy())
        self.is_init = done
        self.traj_ids = torch.where(done, self.traj_ids + self.num_envs, self.traj_ids)
        self.state = {key: out["next", key].masked_fill(done.unsqueeze(1), 0) for key in self.state}
