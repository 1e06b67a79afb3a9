"""An environment that is learned within a thousand frames, but for a few steps."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Threshold(gym.Env):
    """The action 1 is right where the number is above 0.3, in episodes of 8 steps."""

    observation_space = Box(-1, 1, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        reward = float(action == (self.number[0] > 0.3))
        self.steps += 1
        return self._observe(), reward, self.steps == 8, False, {}

    def _observe(self):
        self.number = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.number


if "Threshold-v0" not in gym.registry:
    gym.register("Threshold-v0", Threshold)
