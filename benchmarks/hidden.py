"""Hides numbers of observations, so that a policy has to remember what tells them.

`experiment=cache_lstm` shows the positions of CartPole without its velocities.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

Array = np.ndarray[Any, Any]


class Shown(gym.ObservationWrapper[Array, Any, Array]):
    """Observations of these places alone, each times its scale."""

    def __init__(self, env: gym.Env[Array, Any], scales: dict[int, float]):
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, Box)
        self.places = list(scales)
        self.scales = np.array(list(scales.values()), space.dtype)
        bounds = (self.observation(bound) for bound in (space.low, space.high))
        self.observation_space = Box(*bounds, dtype=space.dtype.type)

    def observation(self, observation: Array) -> Array:
        return observation[self.places] * self.scales
