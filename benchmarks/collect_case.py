"""What every contestant of the collection benchmark collects; imports only torch and gymnasium.

Peers run in their own environment, so this file is all that the two sides of a comparison share:
the same environments, the same policy, the same number of frames to a batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch import nn

ENVS = ("CartPole-v1", "Pendulum-v1")
SIZES = (1, 8, 64)
MODES = ("single", "multi_sync", "multi_async")
OUR_MODES = ("simulated", "distributed")  # which only we have
WORKERS = 2
NATIVE_FROM = 64  # environments from which on gymnasium's native vector is taken, if there is one


@dataclass(frozen=True)
class Case:
    """An environment, how many of it a worker steps, and how workers are arranged."""

    env: str
    num_envs: int
    mode: str

    @property
    def workers(self) -> int:
        return 1 if self.mode == "single" else WORKERS

    @property
    def steps(self) -> int:
        """Steps of each environment in a batch: fewer where there are more of them."""
        return 256 if self.num_envs == 1 else 128 if self.num_envs < NATIVE_FROM else 32

    @property
    def worker_frames(self) -> int:
        """Frames that one worker adds to a batch."""
        return self.steps * self.num_envs

    @property
    def batch_frames(self) -> int:
        """Frames of a batch: of all workers where they wait for each other, else of one."""
        return self.worker_frames * (WORKERS if self.mode in ("multi_sync", "distributed") else 1)

    def message(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.env} × {self.num_envs}, {self.mode}"


def single_env(name: str) -> Callable[[], gymnasium.Env]:
    """A factory of one environment. No library wants the checker's calls in its measurement."""
    return functools.partial(gymnasium.make, name, disable_env_checker=True)


def make_env(name: str, num_envs: int) -> gymnasium.Env | VectorEnv:
    """One environment, a SyncVectorEnv of them, or the native vector where there are many."""
    if num_envs == 1:
        return single_env(name)()
    if num_envs >= NATIVE_FROM and gymnasium.spec(name).vector_entry_point is not None:
        return gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="vector_entry_point")
    return SyncVectorEnv([single_env(name)] * num_envs)


class Policy(nn.Module):
    """64×64 tanh; returns sampled actions and their log-probability."""

    in_keys = ("observation",)
    out_keys = ("action", "action_log_prob")

    def __init__(self, num_inputs: int, num_outputs: int):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(num_inputs, 64), nn.Tanh()),
            *(nn.Linear(64, 64), nn.Tanh()),
            nn.Linear(64, num_outputs),
        )


class CategoricalPolicy(Policy):
    """For a Discrete action space."""

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = torch.log_softmax(self.net(observation), -1)
        # An exponential race: the same distribution as torch.multinomial, at half the time.
        action = (log_probs.exp() / torch.empty_like(log_probs).exponential_()).argmax(-1)
        return action, log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


class GaussianPolicy(Policy):
    """For a Box action space; pendulums clip their torque themselves."""

    def __init__(self, num_inputs: int, num_outputs: int):
        super().__init__(num_inputs, num_outputs)
        self.log_std = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.net(observation)
        noise = torch.randn_like(mean)
        log_prob = -0.5 * noise.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        return mean + self.log_std.exp() * noise, log_prob.sum(-1)


def build_policy(name: str) -> Policy:
    """Build the policy for an environment, with the same initial weights each time."""
    env = single_env(name)()
    inputs, actions = env.observation_space.shape, env.action_space
    env.close()
    assert inputs is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(actions, gymnasium.spaces.Discrete):
            return CategoricalPolicy(inputs[0], int(actions.n))
        assert actions.shape is not None
        return GaussianPolicy(inputs[0], actions.shape[0])


def step_weights(policy: nn.Module, count: int) -> None:
    """A training step, as far as publishing is concerned: it changes something, in place."""
    with torch.no_grad():
        next(policy.parameters()).view(-1)[-1] += 1e-6 if count % 2 else -1e-6
