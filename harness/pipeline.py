"""From the config to the parts of a run: environments, learner, scheme, collector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from gymnasium import Env, Space
from gymnasium.vector import VectorEnv

import collectors
from collectors import BaseCollector, ReplayBuffer
from harness.algorithms.learners import Learner, OffPolicy, OnPolicy
from harness.algorithms.ppo import PPO, PPOConfig
from harness.algorithms.sac import SAC
from harness.config import ConfigError
from harness.config.hosts import JoiningConfig, RayConfig
from harness.config.link import make_link
from harness.config.remote import is_asynchronous, num_hosts
from harness.config.schema import CollectorConfig, Config, SyncConfig
from harness.environments.factory import EnvConfig, EnvFactory
from sync import WeightSyncScheme
from sync.registry import scheme_class

COLLECTORS = {
    "single": "Collector",
    "multi_sync": "MultiSyncCollector",
    "multi_async": "MultiAsyncCollector",
    "distributed": "DistributedCollector",
    "rpc": "RPCCollector",
    "ray": "RayCollector",
}


def make_learner(config: Config) -> Learner:
    """The algorithm for the spaces of the environment; `ConfigError` if they do not fit."""
    observations, actions = spaces(config.env)
    device = torch.device(config.device)
    try:
        if isinstance(config.algo, PPOConfig):
            ppo = PPO(
                config.algo,
                config.model,
                observations,
                actions,
                total_frames=config.total_frames,
                seed=config.seed,
                device=device,
            )
            return OnPolicy(ppo)
        sac = SAC(config.algo, config.model, observations, actions, seed=config.seed, device=device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except (RuntimeError, TypeError, MemoryError) as error:  # for instance, there is not the memory
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model={config.model.name} cannot be made: {what}") from error
    replay = ReplayBuffer(config.algo.buffer_size, seed=config.seed)
    return OffPolicy(sac, replay, extend=not config.collector.free_running)


def spaces(config: EnvConfig) -> tuple[Space[Any], Space[Any]]:
    """What one environment shows and takes, found by making one."""
    one = replace(config, num_envs=1)
    if config.vectorisation != "native":
        one = replace(one, vectorisation="none")
    try:
        env = EnvFactory(one)()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"env.id={config.id} cannot be made: {error}") from error
    try:
        if isinstance(env, VectorEnv):
            return env.single_observation_space, env.single_action_space
        return env.observation_space, env.action_space
    finally:
        _close(env, config)


def _close(env: Env[Any, Any] | VectorEnv, config: EnvConfig) -> None:
    """Close it; `ConfigError` if it cannot be closed, since no worker could end in order then."""
    try:
        env.close()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"env.id={config.id} cannot be closed: {error}") from error


def make_scheme(config: SyncConfig) -> WeightSyncScheme:
    """The sync scheme, not yet connected to anything."""
    scheme: WeightSyncScheme = scheme_class(config.name)(
        strategy=config.strategy,
        sync=config.blocking,
        timeout=config.timeout_s,
        connect_timeout=config.connect_timeout_s,
        check_finite=config.check_finite,
        wire=config.wire,
        link=make_link(config.link),
        **({"check_torn": True} if config.check_torn else {}),
        **({"zero_copy": True} if config.zero_copy else {}),
    )
    return scheme


def make_collector(config: Config, learner: Learner, scheme: WeightSyncScheme) -> BaseCollector:
    """The collector, its workers started."""
    collector: Any = getattr(collectors, COLLECTORS[config.collector.name])(
        EnvFactory(config.env),
        learner.policy,
        frames_per_batch=config.collector.frames_per_batch,
        weight_sync_schemes={"policy": scheme},
        apply_at=config.sync.apply_at,
        state_on_update=config.sync.state_on_update,
        **_free_running(config, learner),
        **_placement(config.collector),
        **_episodes(config),
        **_workers(config.collector),
        **_pacing(config),
        seed=config.seed,
    )
    made: BaseCollector = collector
    return made


def _free_running(config: Config, learner: Learner) -> dict[str, Any]:
    """What a collector is told that fills the replay buffer by itself."""
    if not (config.collector.free_running and isinstance(learner, OffPolicy)):
        return {}
    return {"replay_buffer": learner.replay, "total_frames": config.total_frames}


def _placement(config: CollectorConfig) -> dict[str, Any]:
    return {
        "policy_device": config.devices.policy,
        "storing_device": config.devices.storing,
        "compile_policy": config.compile_policy,
        "cudagraph_policy": config.cudagraph_policy,
    }


def _episodes(config: Config) -> dict[str, Any]:
    collector = config.collector
    return {
        "exploration_type": collector.exploration,
        "max_frames_per_traj": collector.max_frames_per_traj,
        "reset_at_each_iter": collector.reset_at_each_iter,
        "next_observation": collector.next_observation,
        "resume_episodes": collector.resume_episodes,
        "init_random_frames": getattr(config.algo, "learning_starts", 0),
    }


def _workers(config: CollectorConfig) -> dict[str, Any]:
    """What only collectors with workers are told."""
    if config.name == "single":
        return {"timeout": config.timeout_s}
    options: dict[str, Any] = {
        **_hosts(config),
        "num_sub_threads": config.num_threads,
        "timeout": config.timeout_s,
        "on_worker_failure": config.on_worker_failure,
    }
    if config.on_worker_failure == "restart":
        options["max_restarts"] = config.max_restarts
    if config.preemptive_threshold is not None:
        options["preemptive_threshold"] = config.preemptive_threshold
    return options


def _pacing(config: Config) -> dict[str, Any]:
    """How far asynchronous workers may be ahead of the learner."""
    if not is_asynchronous(config.collector):
        return {}
    waits = config.sync.on_stale == "wait"
    return {
        "batches_ahead": config.collector.batches_ahead,
        "max_lag": config.sync.max_lag if waits else None,
    }


def _hosts(config: CollectorConfig) -> dict[str, Any]:
    """How many workers there are, and where they are."""
    remote, hosts = config.remote, num_hosts(config)
    if remote is None:
        return {"num_workers": config.num_workers}
    options: dict[str, Any] = {
        "num_collectors": hosts,
        "num_workers_per_collector": config.num_workers // hosts,
        "sync": not remote.asynchronous,
        "start_timeout": remote.start_timeout_s,
    }
    if isinstance(remote, JoiningConfig):
        where = ("launcher", "host", "port", "address")
        return options | {name: getattr(remote, name) for name in where}
    assert isinstance(remote, RayConfig)
    takes = {
        "num_cpus": remote.num_cpus * (config.num_workers // hosts),
        "num_gpus": remote.num_gpus,
        "resources": remote.resources,
    }
    return options | {"address": remote.address, "remote_configs": takes, "max_collectors": hosts}
