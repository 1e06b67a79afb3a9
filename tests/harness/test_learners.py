from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from collectors import ReplayBuffer
from harness.algorithms.learners import OffPolicy
from harness.options import SACConfig


class Algorithm:
    """Counts the samples that it is given, and owes updates as SAC does."""

    def __init__(self, **config: Any):
        self.config = SACConfig(**config)
        self.sizes: list[int] = []
        self._owed = 0.0

    def updates_due(self, num_frames: int) -> int:
        self._owed += num_frames * self.config.updates_per_frame
        due = int(self._owed)
        self._owed -= due
        return due

    def update(self, samples: TensorDict) -> dict[str, float]:
        self.sizes.append(len(samples))
        return {"train/loss": float(len(self.sizes))}


def batch(num_frames: int, masked: int = 0) -> TensorDict:
    mask = torch.ones(1, num_frames, dtype=torch.bool)
    mask[:, num_frames - masked :] = False
    frames = {"x": torch.zeros(1, num_frames), "collector": {"mask": mask}}
    return TensorDict(frames, [1, num_frames])


def learner(*, extend: bool = True, **config: Any) -> tuple[OffPolicy, Algorithm]:
    algorithm = Algorithm(**config)
    return OffPolicy(algorithm, ReplayBuffer(100), extend=extend), algorithm  # type: ignore[arg-type]


def test_nothing_is_learned_before_the_first_frames_are_in():
    off_policy, algorithm = learner(learning_starts=10, batch_size=4)
    assert off_policy.learn(batch(8), 0) == {"train/replay_frames": 8}
    assert algorithm.sizes == []


@pytest.mark.parametrize(("ratio", "updates"), [(1.0, 8), (0.25, 2), (2.0, 16)])
def test_each_new_frame_is_worth_so_many_updates(ratio, updates):
    off_policy, algorithm = learner(learning_starts=8, batch_size=4, updates_per_frame=ratio)
    metrics = off_policy.learn(batch(8), 0)
    assert algorithm.sizes == [4] * updates
    assert metrics["train/loss"] == (updates + 1) / 2  # the mean


def test_what_only_some_updates_measure_is_a_mean_over_those():
    off_policy, algorithm = learner(learning_starts=8, batch_size=4)
    every = algorithm.update

    def update(samples: TensorDict) -> dict[str, float]:
        late = {"train/alpha": 0.2} if algorithm.sizes else {}
        return every(samples) | late

    algorithm.update = update  # type: ignore[method-assign]
    assert off_policy.learn(batch(8), 0)["train/alpha"] == pytest.approx(0.2)


def test_padding_is_worth_nothing():
    off_policy, algorithm = learner(learning_starts=4, batch_size=4)
    off_policy.learn(batch(8, masked=3), 0)
    assert len(algorithm.sizes) == 5
    assert len(off_policy.replay) == 5


def test_a_buffer_that_the_collector_fills_is_not_filled_twice():
    off_policy, algorithm = learner(extend=False, learning_starts=4, batch_size=4)
    off_policy.replay.extend(batch(8))
    off_policy.learn(batch(8), 0)
    assert len(off_policy.replay) == 8
    assert len(algorithm.sizes) == 8
