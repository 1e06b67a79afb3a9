"""From the config to the parts of a run: environments, learner, scheme, collector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import Env, Space
from gymnasium.vector import VectorEnv
from torch import Tensor

from collectors import BaseCollector, ReplayBuffer
from collectors.rollout.seeds import untouched_streams
from harness.algorithms.interface import Learner, Setup
from harness.callbacks import Callback
from harness.environments.evaluate import Carried
from harness.environments.factory import EnvFactory, alters_returns, check_like_pool, single
from harness.environments.wrappers import KEY, UNKNOWN
from harness.errors import ConfigError, ImpossiblePair
from harness.numbers import count
from harness.options.run import Config, EnvConfig
from harness.registry import algorithms, callbacks, collectors, schemes
from harness.run.background_batches import BackgroundBatches
from sync import SimulatedWeightSyncScheme, WeightSyncScheme

TRIAL_S = 60.0  # for one reset and one step of an environment of the user's own

# The options of a scheme that change weights or versions, whatever moves them.
EFFECTS = ("strategy", "check_finite", "wire", "lag", "tear")


def make_learner(config: Config) -> Learner:
    """The algorithm for the spaces of the environment; `ConfigError` if they do not fit."""
    observations, actions = spaces(config)
    setup = Setup(
        observations,
        actions,
        model=config.model,
        total_frames=config.total_frames,
        seed=config.seed,
        num_workers=config.collector.workers,
        device=torch.device(config.device),
    )
    try:
        algorithm = algorithms.get(config.algo.name).load()(config.algo, setup)
        if getattr(config.algo, "compile", False):
            from harness.algorithms.compiled import compile_steps

            compile_steps(algorithm, config.model.name)
    except ValueError as error:
        raise ImpossiblePair(str(error)) from error
    except (RuntimeError, TypeError, MemoryError) as error:  # for instance, there is not the memory
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model={config.model.name} cannot be made: {what}") from error
    if not config.algo.replays:
        return Learner(algorithm)
    replay = getattr(algorithm, "replay", None)
    if replay is None:
        replay = ReplayBuffer(algorithm.config.buffer_size, seed=config.seed)
    return Learner(algorithm, replay, extend=not config.collector.fills_replay_buffer)


def show_observations(config: Config, learner: Learner) -> None:
    """Give the algorithm observations to start its statistics with, if it asks for them.

    Before version 0 is published, so that its workers act with the same statistics that their
    frames are learned with. The frames are none of the run's, and a resumed run needs none.
    """
    if num_frames := config.algo.sampled_frames:
        make_env = EnvFactory(single(config.env), plugins=tuple(config.plugins))
        learner.algorithm.observe(sample_observations(make_env, num_frames, seed=config.seed))


def try_policy(config: Config, learner: Learner) -> None:
    """Act once with a policy of the user's; `ConfigError` if it writes to its parameters.

    A worker that reads them in shared memory would be ended by the write.
    """
    in_place = config.sync.resolved(config).get(
        "zero_copy", getattr(config.sync, "zero_copy", None)
    )
    packages = {type(part).__module__.partition(".")[0] for part in learner.policy.modules()}
    if not in_place or config.collector.simulates or packages <= {"harness", "torch"}:
        return
    observations, actions = spaces(config)
    policy = deepcopy(learner.policy)
    before = {name: parameter._version for name, parameter in policy.named_parameters()}
    with untouched_streams(), torch.no_grad(), suppress(Exception):  # a worker says where it failed
        Carried(policy, 1, actions).act(torch.as_tensor(observations.sample())[None], [0])
    for (name, parameter), own in zip(
        policy.named_parameters(), learner.policy.parameters(), strict=True
    ):
        if parameter._version != before[name] or not torch.equal(parameter, own):
            raise ConfigError(
                f"sync.zero_copy=true: the policy writes to its parameter {name!r} when it acts, "
                "but workers read their parameters in shared memory, where they are read-only; use "
                "sync.zero_copy=false"
            )


def spaces(config: Config) -> tuple[Space[Any], Space[Any]]:
    """What one environment shows and takes, found by making one."""
    with one_environment(config) as env:
        if isinstance(env, VectorEnv):
            return env.single_observation_space, env.single_action_space
        if config.env.vectorisation == "envpool":
            check_like_pool(config.env, env)
        return env.observation_space, env.action_space


def try_environment(config: Config) -> None:
    """Step an environment of a module that the user names; `ConfigError` says what is wrong.

    It is stepped in a thread, since one that hangs must not hang the run.
    """
    if ":" not in config.env.id:
        return
    from harness.environments.trial import try_out  # here: most environments are not tried

    errors: list[ConfigError] = []

    def trial() -> None:
        try:
            with one_environment(config) as env:
                if not isinstance(env, VectorEnv):
                    try_out(env.unwrapped, config.env.id, seed=config.seed)
        except ConfigError as error:
            errors.append(error)
        except KeyboardInterrupt:  # of the environment: signals reach the main thread alone
            errors.append(ConfigError(f"env.id={config.env.id} raises KeyboardInterrupt"))

    thread = threading.Thread(target=trial, name="trial of the environment", daemon=True)
    thread.start()
    thread.join(TRIAL_S)
    if thread.is_alive():
        raise ConfigError(
            f"env.id={config.env.id}: one reset and one step took more than {TRIAL_S:g} s"
        )
    if errors:
        raise errors[0]


@contextmanager
def one_environment(config: Config) -> Iterator[Env[Any, Any] | VectorEnv]:
    """One environment of the config; `ConfigError` if it cannot be made."""
    one = replace(config.env, num_envs=1)
    if one.vectorisation != "native":
        one = replace(one, vectorisation="none")
    try:
        env = EnvFactory(one, plugins=tuple(config.plugins))()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"env.id={one.id} cannot be made: {error}") from error
    try:
        yield env
    finally:
        _close(env, one)


def _close(env: Env[Any, Any] | VectorEnv, config: EnvConfig) -> None:
    """Close it; `ConfigError` if it cannot be closed, since no worker could end in order then."""
    try:
        env.close()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"env.id={config.id} cannot be closed: {error}") from error


def make_scheme(config: Config) -> WeightSyncScheme:
    """The sync scheme, not yet connected to anything.

    For virtual workers, it keeps what it does to the weights.
    """
    arguments = config.sync.arguments() | config.sync.resolved(config)
    if config.collector.simulates:
        return SimulatedWeightSyncScheme(
            **{key: arguments[key] for key in EFFECTS if key in arguments}
        )
    return schemes.get(config.sync.name).load()(**arguments)


def describe_sync(config: Config, scheme: WeightSyncScheme) -> str:
    """How weights travel in this run, in one line."""
    num_workers = config.collector.workers
    workers = count(num_workers, "worker")
    lag = getattr(config.sync, "lag", 0)
    lag = lag.get("kind", lag) if isinstance(lag, dict) else lag
    zero_copy = vars(scheme).get("zero_copy")  # where that is a choice
    way = "" if zero_copy is None else ", read in place" if zero_copy else ", copied"
    place = config.collector.place
    return f"{scheme.mechanism}{way}, {workers} {place}, {scheme.wire}, added lag {lag}"


def make_collector(
    config: Config, learner: Learner, scheme: WeightSyncScheme, schedule: Path
) -> BaseCollector:
    """The collector, its workers started. schedule: a file for what it may record."""
    fills: dict[str, Any] = {}
    if config.collector.records_schedule and config.sync.versions_travel:
        fills["record_schedule"] = str(schedule)
    if config.collector.fills_replay_buffer and learner.replay is not None:
        fills |= {"replay_buffer": learner.replay, "total_frames": config.total_frames}
    if alters_returns(config.env):
        fills["info_keys"] = {KEY: UNKNOWN}
    collector: BaseCollector = collectors.get(config.collector.name).load()(
        EnvFactory(config.env, plugins=tuple(config.plugins)),
        learner.policy,
        weight_sync_schemes={"policy": scheme},
        apply_at=config.sync.apply_at,
        state_on_update=config.sync.state_on_update,
        seed=config.seed,
        **fills,
        **config.collector.arguments(config),
    )
    return collector


def make_free_running(
    config: Config, collector: BaseCollector, learner: Learner
) -> BackgroundBatches | None:
    """The batches of a collector that fills the replay buffer in the background; else None."""
    if learner.replay is None or not config.collector.fills_replay_buffer:
        return None
    return BackgroundBatches(
        collector,
        learner.replay,
        frames_per_batch=config.collector.frames_per_batch,
        timeout_s=config.collector.timeout_s,
        overwrite=config.collector.overwrites,
    )


def make_callbacks(chosen: Mapping[str, Any]) -> list[Callback]:
    """The callbacks of a config: options by name."""
    return [callbacks.get(name).load()(options) for name, options in chosen.items()]


def sample_observations(make_env: Callable[[], Any], num_frames: int, *, seed: int) -> Tensor:
    """So many observations [N, ...] of one environment, always the same for a seed.

    Nothing here moves a random stream that training draws from.
    """
    with untouched_streams():
        env = make_env()
        try:
            env.action_space.seed(seed)
            observation, _ = env.reset(seed=seed)
            observations = []
            for _ in range(num_frames):
                observations.append(np.array(observation))
                observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
                if terminated or truncated:
                    observation, _ = env.reset()
        finally:
            env.close()
    return torch.as_tensor(np.stack(observations))
