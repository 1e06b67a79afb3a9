"""An environment wrapper, for use by its name or by its import path.

env.wrappers=[{observation_noise: {std: 0.1}}]                            registered
env.wrappers=[{"my_project.wrappers:ObservationNoise": {std: 0.1}}]       by path; needs no plugin
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from harness.registry import wrappers


@wrappers.register("observation_noise")
class ObservationNoise(gym.ObservationWrapper):
    """Adds Gaussian noise to observations, from the environment's own seeded generator."""

    def __init__(self, env: gym.Env, std: float = 0.1):
        super().__init__(env)
        self.std = std

    def observation(self, observation: np.ndarray) -> Any:
        noise = self.std * self.np_random.standard_normal(observation.shape)
        return (observation + noise).astype(observation.dtype)
