"""An environment, an objective, a callback and a model of a user's own, with a mistake in each."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from harness.callbacks import Callback
from harness.models.encoders import Encoder
from harness.options import ModelConfig
from harness.options.base import Options
from harness.registry import callbacks, models, objectives


class Own(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, mistake: str = "", after: int = 40):
        self.mistake, self.left = mistake, after

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.mistake == "no info":
            return self._observation()
        if self.mistake == "exit":
            sys.exit(3)
        if self.mistake == "interrupt":
            raise KeyboardInterrupt
        if self.mistake == "hang":
            threading.Event().wait()
        if self.mistake == "reset":
            raise KeyError("goal")
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.mistake == "late" and not self.left:
            self._explode()
        if self.mistake == "four values":
            return self._observation(), 0.0, False, {}
        if self.mistake == "reward":
            return self._observation(), np.zeros(2), False, False, {}
        return self._observation(), 0.0, False, False, {}

    def _observation(self) -> Any:
        return np.zeros(4 if self.mistake == "shape" else 3, np.float32)

    def _explode(self) -> None:
        raise ZeroDivisionError("the goal is where the agent is")


gym.register("Own-v0", Own)


@objectives.register("loss_itself")
def loss_itself(frames: Any, config: Any, *, options: Any) -> Any:
    return (frames.log_prob * frames.advantages).mean()


@dataclass
class StumblingConfig(Options):
    """Nothing to choose."""


@callbacks.register("stumbling", options=StumblingConfig)
class Stumbling(Callback):
    def on_update(self, run: Any, metrics: dict[str, float]) -> None:
        self._look_up(metrics)

    def _look_up(self, metrics: dict[str, float]) -> None:
        metrics["no_such_metric"] += 1


@dataclass
class RestlessConfig(ModelConfig):
    """A linear layer that writes to its weights when it acts."""

    own_critic = True

    name: str = "restless"
    by: str = "add"


@models.register("restless", options=RestlessConfig)
class Restless(Encoder):
    def __init__(self, config: RestlessConfig, space: gym.spaces.Box):
        super().__init__()
        self.num_features, self.by = 8, config.by
        self.inputs = nn.Linear(space.shape[0], 8)

    def forward(self, observation: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            with torch.no_grad():
                self.inputs.weight.mul_(1.0) if self.by == "mul" else self.inputs.weight.data.add_(
                    1e-6
                )
        return self.inputs(observation)
