"""An environment whose every episode has the same rewards, and wrappers that alter them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

REWARDS = (3.0, -2.0, 5.0, 0.5, 0.5, 2.0, 0.0)  # 9 together, 3 if they are clipped to -1 and 1


class Scored(gym.Env):
    observation_space = Box(0, 1, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        reward = REWARDS[self.steps]
        self.steps += 1
        return self._observe(), reward, self.steps == len(REWARDS), False, {}

    def _observe(self):
        return self.np_random.random(2, np.float32)


class Pictured(Scored):
    """The same, seen as images of bytes."""

    observation_space = Box(0, 255, (10, 10, 3), np.uint8)

    def _observe(self):
        return self.np_random.integers(0, 256, (10, 10, 3), np.uint8)


class ScoredVector(VectorEnv):
    """Several at once, one step apart from each other, in either mode of starting again."""

    single_observation_space = Scored.observation_space
    single_action_space = Scored.action_space

    def __init__(self, num_envs, mode="NextStep"):
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        self.num_envs = num_envs
        self.observation_space = gym.vector.utils.batch_space(Scored.observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(Scored.action_space, num_envs)
        self.waits = mode == "NextStep"

    def reset(self, *, seed=None, options=None):
        self.steps = np.zeros(self.num_envs, int)
        self.over = np.zeros(self.num_envs, bool)
        return self._observe(), {}

    def step(self, actions):
        resets = self.over & self.waits
        self.steps[self.over] = 0
        rewards = np.where(resets, 0, np.take(REWARDS, self.steps))
        self.steps += ~resets
        self.over = self.steps == len(REWARDS)
        info = {} if self.waits else {"final_obs": self._observe(), "final_info": {}}
        return self._observe(), rewards, self.over.copy(), np.zeros(self.num_envs, bool), info

    def _observe(self):
        return np.zeros((self.num_envs, 2), np.float32)


class Lives(gym.Wrapper):
    """Ends an episode after each third step, and goes on with it at the next reset."""

    def __init__(self, env):
        super().__init__(env)
        self.left, self.last = 0, None

    def reset(self, **kwargs):
        if self.left and kwargs.get("seed") is None:
            self.left = 3
            return self.last, {}
        self.left = 3
        self.last, info = self.env.reset(**kwargs)
        return self.last, info

    def step(self, action):
        self.last, reward, terminated, truncated, info = self.env.step(action)
        self.left = self.left - 1 if not terminated else 0
        lost = self.left == 0
        self.left = 1 if lost and not terminated else self.left
        return self.last, reward, terminated or lost, truncated, info


class Arrays(gym.Wrapper):
    """Returns rewards as arrays of one number."""

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, np.array([reward]), *rest


class Silent(gym.Wrapper):
    """Doubles rewards, and keeps the info of what it wraps to itself."""

    def step(self, action):
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, 2 * reward, terminated, truncated, {}


for name, kind in {"Scored-v0": Scored, "Pictured-v0": Pictured}.items():
    if name not in gym.registry:
        gym.register(name, kind, vector_entry_point=ScoredVector)
