"""An environment that paints: one grey level brighter with each of its five steps."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Painted(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, render_mode=None, width=100, missing=None):
        self.render_mode = render_mode
        self.missing = missing  # what gymnasium says of a package that is not installed
        self.width = width

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 2.0, self.steps == 5, False, {}

    def render(self):
        if self.render_mode is None:
            return None
        if self.missing is not None:
            raise gym.error.DependencyNotInstalled(self.missing)
        return np.full((self.width // 2, self.width, 3), 40 * self.steps, np.uint8)


if "Painted-v0" not in gym.registry:
    gym.register("Painted-v0", Painted)
