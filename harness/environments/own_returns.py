"""The environment's own returns, whatever wrappers make of its rewards and steps.

env  →  OwnEpisode (counts)  →  wrappers  →  TellOwnEpisode (adds the counts to `info`)

The entry of `info` is four numbers: the return and the length of the environment's own episode so
far, whether the episode is over, and whether this is its first step that the learner sees.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

KEY = "own_episode"
RETURN, LENGTH, OVER, FIRST = range(4)
UNKNOWN = np.full(4, np.nan)  # for a step whose info lacks the entry


def as_number(reward: Any) -> float:
    """A reward as a number; arrays of one element are rewards as well, as in collectors."""
    return float(np.asarray(reward).item())


class OwnEpisode(gym.Wrapper[Any, Any, Any, Any]):
    """Counts, right around the environment."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        self.number = 0  # of the episode
        self.total, self.length, self.over = 0.0, 0, False

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.number += 1
        self.total, self.length, self.over = 0.0, 0, False
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.total += as_number(reward)
        self.length += 1
        self.over = bool(terminated or truncated)
        return observation, reward, terminated, truncated, info


class TellOwnEpisode(gym.Wrapper[Any, Any, Any, Any]):
    """Adds what `own` has counted to every step's info, outside of all other wrappers."""

    def __init__(self, env: gym.Env[Any, Any], counter: OwnEpisode):
        super().__init__(env)
        self.counter = counter
        self._told = 0  # the number of the last episode

    def step(self, action: Any) -> Any:
        *result, info = self.env.step(action)
        counter, is_first = self.counter, self.counter.number != self._told
        self._told = counter.number
        counted = np.array([counter.total, counter.length, counter.over, is_first], np.float64)
        return *result, {**info, KEY: counted}


class OwnEpisodesOfVector(VectorWrapper):
    """Both in one for a native vector, whose wrappers step as it does."""

    def __init__(self, env: VectorEnv):
        super().__init__(env)
        mode = getattr(env.unwrapped, "autoreset_mode", env.metadata.get("autoreset_mode"))
        self._resets_alone = mode in (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP.value)
        self._counted = np.zeros((env.num_envs, 4))
        self._counted[:, FIRST] = True

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        which = (options or {}).get("reset_mask", slice(None))
        self._begin(which)
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        counted = self._counted
        counted[counted[:, LENGTH] > 0, FIRST] = False
        ended = counted[:, OVER] > 0
        self._begin(ended)
        observation, reward, terminated, truncated, info = self.env.step(actions)
        counts = ~ended if self._resets_alone else np.ones_like(ended)
        counted[counts, RETURN] += np.asarray(reward, np.float64)[counts]
        counted[counts, LENGTH] += 1
        counted[:, OVER] = np.logical_or(terminated, truncated) & counts
        info = {**info, KEY: counted.copy()}
        if "final_info" in info:
            info["final_info"] = {**info["final_info"], KEY: counted.copy()}
        return observation, reward, terminated, truncated, info

    def _begin(self, which: Any) -> None:
        self._counted[which] = 0
        self._counted[which, FIRST] = True
