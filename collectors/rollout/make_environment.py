"""Calls the user's factory, and wraps its environment for the rollout."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from collectors.options.rollout_options import RolloutOptions
from collectors.rollout.environment import Environments, OneEnv
from collectors.rollout.episode_replay import writes_files
from collectors.rollout.infos import Infos
from collectors.rollout.seeds import Seeds, untouched_streams
from collectors.rollout.spaces import name_of, text_keys
from collectors.rollout.vector_environment import adapt_vector

STATISTICS = {"NormalizeObservation", "NormalizeReward"}  # wrappers that gather statistics


def make_environments(
    factory: Callable[..., Any],
    kwargs: Mapping[str, Any] | None = None,
    options: RolloutOptions = RolloutOptions(),  # noqa: B008 - immutable
    *,
    worker_idx: int = 0,
    seed: int = 0,
) -> Environments:
    """Call the factory, and wrap what it makes.

    The global random streams are seeded from `seed` while the factory runs, and restored.
    """
    offered = {"worker_idx": worker_idx, "seed": seed}
    with untouched_streams():
        Seeds(seed).seed_streams()
        env = factory(**{**_accepted(factory, offered), **(kwargs or {})})
    environments = _adapt(env)
    statistics = sorted(STATISTICS & set(_chain(env)))
    if worker_idx == 0:  # once for all workers
        _warn_of_what_is_lost(environments, statistics)
    _check(options, environments)
    environments.max_frames = options.max_frames_per_traj
    environments.halting = not options.reset_when_done
    if environments.history is not None:
        environments.history.timeout = options.resume_timeout
        members = environments.history.members
        if not options.resume_episodes or statistics or any(map(writes_files, members)):
            environments.history = None
    if options.info_keys:
        environments.infos = Infos(options.info_keys, environments.observations, str(environments))
    return environments


def _check(options: RolloutOptions, environments: Environments) -> None:
    """Refuse options that need other environments, and close these."""
    problem = None
    if options.max_frames_per_traj is not None and not environments.can_reset_some:
        problem = (
            f"max_frames_per_traj={options.max_frames_per_traj}: {environments} can only be reset "
            "all at once"
        )
    elif options.apply_at == "episode" and environments.num_envs > 1:
        problem = (
            f"apply_at='episode' needs one environment per worker, but this worker has "
            f"{environments.num_envs} ({environments}), whose episodes start at different steps; "
            "use one environment per worker, or apply_at='step' or 'batch'"
        )
    if problem is not None:
        environments.close()
        raise ValueError(problem)


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
