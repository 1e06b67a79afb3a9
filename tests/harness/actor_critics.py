"""PPO and IMPALA on environments that make no sense, for tests of what both promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from tensordict import TensorDict

from harness.algorithms.actor_critic import ActorCritic
from harness.algorithms.grpo import GRPOConfig
from harness.algorithms.impala import IMPALA, IMPALAConfig
from harness.algorithms.interface import Setup
from harness.algorithms.ppo import PPO, PPOConfig
from harness.models.encoders import CNNConfig, LSTMConfig, MLPConfig
from harness.registry import choice, objectives
from tests.harness.rollouts import noise

VECTOR = Box(-1, 1, (3,), np.float32)
DISCRETE = Discrete(3)
MODELS = {
    "mlp": (MLPConfig(hidden_sizes=[8]), VECTOR),
    "lstm": (LSTMConfig(hidden_sizes=[8], lstm_size=6, sequence_length=4), VECTOR),
    "cnn": (CNNConfig(hidden_sizes=[8]), Box(0, 255, (36, 36, 1), np.uint8)),
}
ACTIONS = {
    "discrete": DISCRETE,
    "several": MultiDiscrete([2, 3]),
    "box": Box(-1, 1, (2,), np.float32),
}


def setup(model: str = "mlp", actions: str = "discrete", total: int = 10_000) -> Setup:
    network, observations = MODELS[model]
    return Setup(observations, ACTIONS[actions], network, total_frames=total)


def options(**config: Any) -> PPOConfig:
    """PPO's options, and what the objective among them needs: V-trace, or those of GRPO."""
    name, _ = choice(config.get("objective", "behaviour"), "objective")
    needs = objectives.get(name).options if name in objectives else None
    if getattr(needs, "needs_vtrace", False):
        config = {"vtrace": True, **config}
    return (GRPOConfig if getattr(needs, "needs_episodes", False) else PPOConfig)(**config)


def ppo(
    model: str = "mlp", actions: str = "discrete", *, total: int = 10_000, **config: Any
) -> PPO:
    config = {"minibatch_size": 16, "learning_rate": 1e-2, **config}
    return PPO(options(**config), setup(model, actions, total))


def impala(
    model: str = "mlp", actions: str = "discrete", *, total: int = 10_000, **config: Any
) -> IMPALA:
    return IMPALA(IMPALAConfig(**{"learning_rate": 1e-2, **config}), setup(model, actions, total))


def rollout(
    learner: ActorCritic, model: str = "mlp", actions: str = "discrete", steps: int = 21
) -> TensorDict:
    return noise(MODELS[model][1], ACTIONS[actions]).collect(learner.policy, steps)


def weights_of(learner: ActorCritic) -> dict[str, Any]:
    """Weights and statistics, by name."""
    state = learner.state_dict()
    parts = {name: state[name] for name in ("policy", "critic", "statistics") if name in state}
    return dict(leaves(parts))


def leaves(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{name}.{key}")
    else:
        yield name, torch.as_tensor(value)


def same(first: ActorCritic, second: ActorCritic) -> bool:
    pairs = zip(weights_of(first).values(), weights_of(second).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
