"""Wrappers that gymnasium lacks, for `env.wrappers`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict


class EpisodicLife(gym.Wrapper[Any, Any, Any, Any]):
    """Ends an episode with each life of an Atari game; the game goes on until it is over.

    It follows `atari`, whose own `terminal_on_life_loss` starts a new game after each life.
    """

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        self._lives = 0
        self._is_over = True

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self._is_over or kwargs.get("seed") is not None:
            observation, info = self.env.reset(**kwargs)
        else:
            observation, _, terminated, truncated, info = self.env.step(0)  # goes on, doing nothing
            if terminated or truncated:
                observation, info = self.env.reset(**kwargs)
        self._lives = _lives(self.env)
        self._is_over = False
        return observation, info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._is_over = bool(terminated or truncated)
        before, self._lives = self._lives, _lives(self.env)
        return observation, reward, terminated or 0 < self._lives < before, truncated, info


class FireReset(gym.Wrapper[Any, Any, Any, Any]):
    """Presses the button that starts an Atari game, where it has one, after each reset."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        if self._fire is not None:
            observation, _, terminated, truncated, info = self.env.step(self._fire)
            if terminated or truncated:
                observation, info = self.env.reset(**kwargs)
        return observation, info


def _lives(env: gym.Env[Any, Any]) -> int:
    return int(env.unwrapped.ale.lives())  # type: ignore[attr-defined]


class OneHotGrid(gym.ObservationWrapper[Any, Any, Any]):
    """MiniGrid's view as an image with one channel for each kind, colour and state of a cell.

    Text, such as the mission, is left out.
    """

    def __init__(self, env: gym.Env[Any, Any]):
        from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX

        super().__init__(env)
        space = env.observation_space
        image = space["image"] if isinstance(space, Dict) else space
        self._sizes = [len(names) for names in (OBJECT_TO_IDX, COLOR_TO_IDX, STATE_TO_IDX)]
        assert image.shape is not None
        shape = (*image.shape[:2], sum(self._sizes))
        self.observation_space = Box(0, 1, shape, np.bool_)

    def observation(self, observation: Any) -> Any:
        image = observation["image"] if isinstance(observation, dict) else observation
        parts = [
            image[..., i, None] == np.arange(size, dtype=np.uint8)
            for i, size in enumerate(self._sizes)
        ]
        return np.concatenate(parts, axis=-1)
