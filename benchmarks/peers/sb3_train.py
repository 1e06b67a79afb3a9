"""stable-baselines3's PPO and SAC, as a contestant of the training benchmark.

The time is that of `learn`. Where its settings cannot be those of the others: PPO limits value
predictions without taking the worse of the two errors; SAC has one learning rate for all, which is
that of the critics here, and takes one policy step after each critic step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from stable_baselines3 import PPO as StablePPO
from stable_baselines3 import SAC as StableSAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack
from torch import nn

from benchmarks.collect_case import single_env
from benchmarks.train_case import PONG, SAC, Episodes, Trained, Training, ppo_settings, serve


def monitored(name: str) -> Monitor:
    """One environment that remembers its episodes, as the library itself makes them."""
    return Monitor(single_env(name)())


def make_ppo(training: Training, *, subproc: bool = False) -> BaseAlgorithm:
    ppo = ppo_settings(training.algo)
    policy, options = "MlpPolicy", {}
    if training.algo == "pong":
        policy, vector = "CnnPolicy", make_pong(ppo.num_envs, subproc=subproc)
    else:
        makers: list[Callable[[], Any]] = [functools.partial(monitored, ppo.env)] * ppo.num_envs
        vector = SubprocVecEnv(makers, start_method="fork") if subproc else DummyVecEnv(makers)
        widths = list(ppo.hidden_sizes)
        options = {"net_arch": {"pi": widths, "vf": widths}, "activation_fn": nn.Tanh}
    return StablePPO(
        policy,
        vector,
        learning_rate=lambda remaining: ppo.learning_rate * remaining,
        n_steps=ppo.num_steps,
        batch_size=ppo.minibatch_size,
        n_epochs=ppo.epochs,
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        clip_range=ppo.clip,
        clip_range_vf=ppo.clip,
        ent_coef=ppo.entropy_weight,
        vf_coef=ppo.value_weight / 2,  # it takes the whole squared error
        max_grad_norm=ppo.max_grad_norm,
        policy_kwargs=options,
        seed=training.seed,
        device="cpu",
    )


def make_pong(num_envs: int, *, subproc: bool) -> VecEnv:
    """As the library's zoo makes it; its CnnPolicy is the Nature network."""
    import ale_py

    gymnasium.register_envs(ale_py)
    kind = SubprocVecEnv if subproc else DummyVecEnv
    started = {"start_method": "fork"} if subproc else {}
    vector = make_atari_env(PONG.env, n_envs=num_envs, vec_env_cls=kind, vec_env_kwargs=started)
    return VecFrameStack(vector, n_stack=4)


def make_sac(training: Training, *, train_freq: int = 1) -> BaseAlgorithm:
    return StableSAC(
        "MlpPolicy",
        DummyVecEnv([functools.partial(monitored, SAC.env)]),
        learning_rate=SAC.critic_learning_rate,
        buffer_size=max(training.frames, SAC.batch_size),
        learning_starts=SAC.learning_starts,
        batch_size=SAC.batch_size,
        tau=SAC.tau,
        gamma=SAC.gamma,
        train_freq=train_freq,
        gradient_steps=train_freq,
        policy_kwargs={"net_arch": list(SAC.hidden_sizes), "activation_fn": nn.ReLU},
        seed=training.seed,
        device="cpu",
    )


def episodes_of(vector: VecEnv, skipped: int) -> list[Episodes]:
    """All environments step together, so an environment's own steps say what frame it was.

    skipped: so many of the environment's own frames are one step.
    """
    found = []
    returns, lengths = (vector.env_method(f"get_episode_{what}") for what in ("rewards", "lengths"))
    for its_returns, its_lengths in zip(returns, lengths, strict=True):
        steps = 0
        for gained, length in zip(its_returns, its_lengths, strict=True):
            steps += length
            found.append(Episodes(steps * vector.num_envs // skipped, float(gained)))
    return found


def train(training: Training, options: dict[str, Any]) -> Trained:
    make = make_sac if training.algo == "sac" else make_ppo
    algorithm = make(training, **options)
    vector = algorithm.get_env()
    assert vector is not None
    begun = time.perf_counter()
    algorithm.learn(training.frames)
    seconds = time.perf_counter() - begun
    episodes = episodes_of(vector, skipped=4 if training.algo == "pong" else 1)
    vector.close()
    return Trained(algorithm.num_timesteps, seconds, episodes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(train)
