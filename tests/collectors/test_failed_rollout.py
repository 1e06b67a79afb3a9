"""A batch that ends in an exception is not gone on with: new episodes start."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from collectors import Collector


class Counting(gym.Env):
    """Observes the number of the step in its episode; fails once, when it is told to."""

    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    fail_at = -1

    def __init__(self):
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fail_at:
            Counting.fail_at = -1
            raise RuntimeError("the simulator failed")
        return np.full(1, self.steps, np.float32), 1.0, False, False, {}


def test_after_an_error_the_next_batch_starts_new_episodes():
    with Collector(Counting, frames_per_batch=10) as collector:
        assert collector.next()["observation"].flatten().tolist() == list(range(10))
        Counting.fail_at = 15
        with pytest.raises(RuntimeError, match="the simulator failed"):
            collector.next()
        batch = collector.next()
        assert batch["observation"].flatten().tolist() == list(range(10))
        assert batch["is_init"].flatten().tolist() == [True] + [False] * 9
        stats = collector.stats()
        assert stats["dropped"] == 4
        assert stats["collected"] == stats["delivered"] + stats["dropped"] + stats["in_flight"]


def test_after_an_error_a_saved_state_is_gone_on_with():
    with Collector(Counting, frames_per_batch=10) as collector:
        collector.next()
        state = collector.state_dict()
        Counting.fail_at = 15
        with pytest.raises(RuntimeError, match="the simulator failed"):
            collector.next()
        assert collector.load_state_dict(state)
        batch = collector.next()
        assert batch["observation"].flatten().tolist() == list(range(10, 20))
