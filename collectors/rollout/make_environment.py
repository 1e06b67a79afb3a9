"""Calls the user's factory, and wraps its environment for the rollout."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from collectors.rollout.environment import Environments, OneEnv
from collectors.rollout.episode_replay import writes_files
from collectors.rollout.infos import Infos
from collectors.rollout.spaces import name_of, text_keys
from collectors.rollout.vector_environment import adapt_vector

STATISTICS = {"NormalizeObservation", "NormalizeReward"}  # wrappers that gather statistics


def make_environments(
    factory: Callable[..., Any],
    kwargs: dict[str, Any] | None = None,
    *,
    worker_idx: int = 0,
    seed: int = 0,
    max_frames: int | None = None,
    halting: bool = False,
    resume_episodes: bool = True,
    resume_timeout: float = math.inf,
    info_keys: Iterable[str] | Mapping[str, Any] = (),
) -> Environments:
    """Call the factory, and wrap what it makes."""
    offered = {"worker_idx": worker_idx, "seed": seed}
    env = factory(**{**_accepted(factory, offered), **(kwargs or {})})
    environments = _adapt(env)
    statistics = sorted(STATISTICS & set(_chain(env)))
    if worker_idx == 0:  # once for all workers
        _warn_of_what_is_lost(environments, statistics)
    if max_frames is not None and not environments.can_reset_some:
        environments.close()
        raise ValueError(
            f"max_frames_per_traj={max_frames}: {environments} can only be reset all at once"
        )
    environments.max_frames = max_frames
    environments.halting = halting
    if environments.history is not None:
        environments.history.timeout = resume_timeout
        members = environments.history.members
        if not resume_episodes or statistics or any(map(writes_files, members)):
            environments.history = None
    if info_keys:
        environments.infos = Infos(info_keys, environments.observations, str(environments))
    return environments


def _accepted(factory: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """The arguments for which the factory has a parameter without a default of its own."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # unknown, as for some built-in functions
        return {}
    open_ = {n for n, one in parameters.items() if one.default is one.empty or one.default is None}
    return {name: value for name, value in offered.items() if name in open_}


def _warn_of_what_is_lost(environments: Environments, statistics: Iterable[str]) -> None:
    """Warn of observations that batches lack, and of statistics that differ between workers."""
    if texts := text_keys(environments.observation_space):
        names = ", ".join(repr(name_of(key)) for key in texts)
        warnings.warn(
            f"{environments}: Text observations are left out of batches: {names}; a wrapper in "
            "create_env_fn can encode them as numbers",
            stacklevel=2,
        )
    for name in statistics:
        warnings.warn(
            f"{environments}: the statistics of {name} differ between workers and are lost on "
            "resume. With run.py, algo.normalise_observations=true and algo.normalise_rewards=true "
            "(PPO) keep one set of statistics, which is sent with the weights and checkpointed",
            stacklevel=2,
        )


def _chain(env: Any) -> Iterator[str]:
    """The class names of an environment and of all that it wraps."""
    yield type(env).__name__
    if isinstance(env, SyncVectorEnv):
        yield from _chain(env.envs[0])
    elif isinstance(env, gym.Wrapper | VectorWrapper):
        yield from _chain(env.env)


def _adapt(env: Any) -> Environments:
    if isinstance(env, VectorEnv):
        return adapt_vector(env)
    if isinstance(env, gym.Env):
        return OneEnv(env)
    raise TypeError(
        f"create_env_fn must return a gymnasium.Env or a gymnasium.vector.VectorEnv, "
        f"it returned a {type(env).__module__}.{type(env).__qualname__}"
    )
