"""Wrappers that gymnasium lacks: for `env.wrappers`, and to count the environment's own returns."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from harness.registry import wrappers


@wrappers.register("episodic_life")
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


@wrappers.register("fire_reset")
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


@wrappers.register("one_hot_grid")
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


# -- the environment's own returns, whatever wrappers make of its rewards and steps
#
# env  →  OwnEpisode (counts)  →  wrappers  →  ReportOwnEpisode (adds the counts to `info`)
#
# The entry of `info` is four numbers: the return and the length of the environment's own episode so
# far, whether the episode is over, and whether this is its first step that the learner sees.

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


class ReportOwnEpisode(gym.Wrapper[Any, Any, Any, Any]):
    """Adds what `own` has counted to every step's info, outside of all other wrappers."""

    def __init__(self, env: gym.Env[Any, Any], counter: OwnEpisode):
        super().__init__(env)
        self.counter = counter
        self._reported = 0  # the number of the last episode

    def step(self, action: Any) -> Any:
        *result, info = self.env.step(action)
        counter, is_first = self.counter, self.counter.number != self._reported
        self._reported = counter.number
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
