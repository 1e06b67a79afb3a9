"""Observations of random actions: what statistics start with before there is any policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.rollout.seeds import untouched_streams


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
