"""From what the user's factory makes to what a rollout steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from collectors.rollout.environment import Environments, OneEnv
from collectors.rollout.episode_replay import writes_files
from collectors.rollout.vector_environment import adapt_vector


def make_environments(
    factory: Callable[..., Any],
    kwargs: dict[str, Any] | None = None,
    *,
    max_frames: int | None = None,
    halting: bool = False,
    resume_episodes: bool = True,
    resume_timeout: float = math.inf,
) -> Environments:
    """Call the factory, and take what it gives by the way its episodes follow each other."""
    env = factory(**(kwargs or {}))
    environments = _adapt(env)
    if max_frames is not None and not environments.can_reset_some:
        environments.close()
        raise ValueError(
            f"max_frames_per_traj={max_frames}: {environments} can only be reset as a whole, so "
            "that no single trajectory can be cut"
        )
    environments.max_frames = max_frames
    environments.halting = halting
    history = environments.history
    if history is not None:
        history.timeout = resume_timeout
        if not resume_episodes or any(map(writes_files, history.members)):
            environments.history = None
    return environments


def _adapt(env: Any) -> Environments:
    if isinstance(env, VectorEnv):
        return adapt_vector(env)
    if isinstance(env, gym.Env):
        return OneEnv(env)
    raise TypeError(
        f"create_env_fn must make a gymnasium.Env or a gymnasium.vector.VectorEnv, "
        f"it made a {type(env).__module__}.{type(env).__qualname__}"
    )
