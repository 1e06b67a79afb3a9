"""An environment that kills the process it is stepped in, as running out of memory would."""

from __future__ import annotations

import os
import signal

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv


class Deadly(CartPoleEnv):
    def __init__(self, *, kill: bool, **kwargs):
        super().__init__(**kwargs)
        self.kill = kill

    def step(self, action):
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


gym.register("Deadly-v0", Deadly, max_episode_steps=50)
