"""Environments that end: their process, once, or the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv


class Mortal(gym.Env[Any, Any]):
    """Kills its process at the step `after`, unless the file `flag` says that it has done so."""

    def __init__(self, flag: str = "", after: int = 300, **kwargs: Any):
        super().__init__(**kwargs)
        self.flag, self.after, self.taken = flag, after, 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        if self.flag and self.taken == self.after and not Path(self.flag).exists():
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class MortalCartPole(Mortal, CartPoleEnv):
    """CartPole that ends its process once."""


class MortalPendulum(Mortal, PendulumEnv):
    """Pendulum that ends its process once."""


class Poisoned(CartPoleEnv):
    """Rewards become infinite, from which no learner recovers."""

    def __init__(self, after: int = 400, **kwargs: Any):
        super().__init__(**kwargs)
        self.after, self.taken = after, 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        observation, reward, *rest = super().step(action)
        return (observation, float("inf") if self.taken > self.after else reward, *rest)


class Raising(CartPoleEnv):
    """Raises in the middle of an episode."""

    def __init__(self, after: int = 150, **kwargs: Any):
        super().__init__(**kwargs)
        self.after, self.taken = after, 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        observation, *rest = super().step(action)
        if self.taken == self.after:
            raise ArithmeticError(f"at {observation.tolist()}")
        return (observation, *rest)


gym.register("Raising-v0", Raising, max_episode_steps=60)
gym.register("MortalCartPole-v0", MortalCartPole, max_episode_steps=60)
gym.register("MortalPendulum-v0", MortalPendulum, max_episode_steps=60)
gym.register("Poisoned-v0", Poisoned, max_episode_steps=60)
