"""Frames a second of PPO's updates alone: ours, eager and compiled, beside bare loops.

    .venv/bin/python docs/performance/update.py [--rounds 5] [--updates 20]

CartPole's size: batches of 8 x 128 frames, minibatches of 256, 4 epochs, two networks of 64 x 64
with tanh, one torch thread. The bare loops compute the same loss from prepared frames: no
advantages, no metrics, no sequences, only shuffling, loss, gradient, clipping and Adam. Two are in
torch, with its fused Adam; the third, the limit, is update_limit.cpp, whose gradient is checked
against autograd's first. All take turns. Ratios are of the time of the process on the processor,
which other processes disturb less than the time that passes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.performance.update_limit import Limit  # noqa: E402
from harness.algorithms.interface import Setup  # noqa: E402
from harness.algorithms.ppo import PPO, PPOConfig  # noqa: E402
from harness.models.encoders import MLPConfig  # noqa: E402

ENVS, STEPS, MINIBATCH, EPOCHS = 8, 128, 256, 4
FRAMES = ENVS * STEPS
OBSERVATIONS, ACTIONS = Box(-1, 1, (4,), np.float32), Discrete(2)
LEARNING_RATE = 2.5e-4
CONFIG = {"minibatch_size": MINIBATCH, "epochs": EPOCHS, "anneal_learning_rate": False}

Update = Callable[[], object]


class Speed(NamedTuple):
    """Frames a second."""

    wall: float
    process: float


def made_batch() -> TensorDict:
    """A batch as collectors make them, of numbers by chance."""
    shape = (ENVS, STEPS)
    done = torch.rand(shape) < 0.02
    observation = torch.randn(*shape, 4)
    envs = torch.arange(ENVS).unsqueeze(1).expand(shape)
    content = {
        "observation": observation,
        "action": torch.randint(2, shape),
        "action_log_prob": torch.full(shape, -0.6931),
        "is_init": done.roll(1, 1),
        "policy_version": torch.zeros(shape, dtype=torch.int64),
        "next": {
            "observation": observation.roll(-1, 1),
            "reward": torch.ones(shape),
            "terminated": done,
            "truncated": torch.zeros_like(done),
            "done": done,
        },
        "collector": {
            "traj_ids": done.cumsum(1) - done.int(),
            "worker": torch.zeros(shape, dtype=torch.int64),
            "env": envs.clone(),
            "mask": torch.ones_like(done),
        },
    }
    return TensorDict(content, batch_size=shape)


def ours(batch: TensorDict, *, compiled: bool) -> Update:
    """The whole of `PPO.update`."""
    setup = Setup(OBSERVATIONS, ACTIONS, MLPConfig(), total_frames=1)
    ppo = PPO(PPOConfig(**CONFIG, compile=compiled), setup)
    return lambda: ppo.update(batch, 0)


def columns(batch: TensorDict) -> list[Tensor]:
    """What the bare loops learn from: inputs, actions, and what `loss` makes of them."""
    target = torch.randn(FRAMES)
    return [
        batch["observation"].flatten(0, 1),
        batch["action"].flatten(),
        batch["action_log_prob"].flatten(),
        torch.randn(FRAMES),
        target,
        target + 0.1 * torch.randn(FRAMES),
    ]


def network(outputs: int) -> nn.Module:
    """One of the two."""
    return nn.Sequential(
        *(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    )


def loss(policy: nn.Module, critic: nn.Module, columns: Sequence[Tensor]) -> Tensor:
    """PPO's, of a minibatch."""
    inputs, action, old_log_prob, advantage, target, old_value = columns
    log_probs = policy(inputs).log_softmax(-1)
    ratio = (log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1) - old_log_prob).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    value = critic(inputs).squeeze(-1)
    clipped = old_value + (value - old_value).clamp(-0.2, 0.2)
    errors = torch.max((value - target).square(), (clipped - target).square())
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return policy_loss + 0.25 * errors.mean() - 0.01 * entropy


def in_minibatches(batch: TensorDict, step: Callable[..., object]) -> Update:
    """An update of gradient steps alone."""
    prepared = columns(batch)

    def update() -> None:
        for _ in range(EPOCHS):
            order = torch.randperm(FRAMES)
            for part in zip(*(x[order].split(MINIBATCH) for x in prepared), strict=True):
                step(*part)

    return update


def bare(batch: TensorDict, *, compiled: bool) -> Update:
    """Gradient steps in plain torch."""
    policy, critic = network(2), network(1)
    parameters = [*policy.parameters(), *critic.parameters()]
    optimiser = torch.optim.Adam(parameters, LEARNING_RATE, eps=1e-5, fused=True)
    compute = torch.compile(loss) if compiled else loss

    def step(*part: Tensor) -> None:
        optimiser.zero_grad()
        compute(policy, critic, part).backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimiser.step()

    return in_minibatches(batch, step)


def limit(batch: TensorDict) -> Update:
    """Gradient steps in C++."""
    weights = parameters_to_vector([*network(2).parameters(), *network(1).parameters()])
    return in_minibatches(batch, Limit(weights.detach(), LEARNING_RATE).step)


def limit_error(batch: TensorDict) -> float:
    """How far the limit's first gradient is from autograd's, over the largest number in that."""
    policy, critic = network(2), network(1)
    parameters = [*policy.parameters(), *critic.parameters()]
    part = [column[:MINIBATCH].contiguous() for column in columns(batch)]
    expected = parameters_to_vector(torch.autograd.grad(loss(policy, critic, part), parameters))
    loop = Limit(parameters_to_vector(parameters).detach(), LEARNING_RATE)
    loop.step(*part)
    return float((loop.gradient - expected).abs().max() / expected.abs().max())


def speed(update: Update, updates: int) -> Speed:
    """How fast so many updates are."""
    wall, process = time.perf_counter(), time.process_time()
    for _ in range(updates):
        update()
    frames = updates * FRAMES
    return Speed(frames / (time.perf_counter() - wall), frames / (time.process_time() - process))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="of each, in a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = made_batch()
    print(f"gradient of the limit: {limit_error(batch):.1e} from autograd's, of the largest")
    contestants = {
        "limit, C++": limit(batch),
        "bare, loss compiled": bare(batch, compiled=True),
        "bare, eager": bare(batch, compiled=False),
        "lockstep, algo.compile=true": ours(batch, compiled=True),
        "lockstep, eager": ours(batch, compiled=False),
    }
    for update in contestants.values():
        speed(update, 3)
    found: dict[str, list[Speed]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name, update in contestants.items():
            found[name].append(speed(update, arguments.updates))
    medians = {
        name: Speed(*map(statistics.median, zip(*speeds, strict=True)))
        for name, speeds in found.items()
    }
    most, least = medians["limit, C++"], medians["bare, eager"]
    print(f"torch {torch.__version__}, {platform.machine()}; medians of {arguments.rounds} rounds")
    print("| | frames/s | frames/s of processor time | of the limit | times bare, eager |")
    print("|---|---:|---:|---:|---:|")
    for name, (wall, process) in medians.items():
        print(
            f"| {name} | {wall:,.0f} | {process:,.0f} | {process / most.process:.2f} "
            f"| {process / least.process:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
