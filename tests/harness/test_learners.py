from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from collectors import ReplayBuffer
from harness.algorithms.interface import Learner, ReplayAlgorithm
from harness.algorithms.sac import SACConfig


class Algorithm(ReplayAlgorithm):
    """Counts the samples that it is given."""

    def __init__(self, **config: Any):
        self.config = SACConfig(**config)
        self.sizes: list[int] = []
        self.observed = 0

    def observe(self, observations: torch.Tensor) -> None:
        self.observed += len(observations)

    def update(self, samples: TensorDict) -> dict[str, float]:
        self.sizes.append(len(samples))
        return {"train/loss": float(len(self.sizes))}


def batch(num_frames: int, masked: int = 0) -> TensorDict:
    mask = torch.ones(1, num_frames, dtype=torch.bool)
    mask[:, num_frames - masked :] = False
    frames = {"x": torch.zeros(1, num_frames), "collector": {"mask": mask}}
    return TensorDict(frames, [1, num_frames])


def stamped(versions: list[int]) -> TensorDict:
    found = batch(len(versions))
    found["policy_version"] = torch.tensor([versions])
    return found


def learner(*, extend: bool = True, **config: Any) -> tuple[Learner, Algorithm]:
    algorithm = Algorithm(**config)
    return Learner(algorithm, ReplayBuffer(100), extend=extend), algorithm


@pytest.mark.parametrize(("starts", "size"), [(10, 4), (4, 10)])
def test_nothing_is_learned_before_the_first_frames_are_in(starts, size):
    off_policy, algorithm = learner(learning_starts=starts, batch_size=size)
    assert off_policy.learn(batch(8), 0) == {"train/replay_frames": 8}
    assert algorithm.sizes == []


@pytest.mark.parametrize(("ratio", "updates"), [(1.0, 8), (0.25, 2), (2.0, 16)])
def test_each_new_frame_is_worth_so_many_updates(ratio, updates):
    off_policy, algorithm = learner(learning_starts=8, batch_size=4, updates_per_frame=ratio)
    metrics = off_policy.learn(batch(8), 0)
    assert algorithm.sizes == [4] * updates
    assert metrics["train/loss"] == (updates + 1) / 2  # the mean


@pytest.mark.parametrize(("rate", "due"), [(1.0, [3, 3, 3]), (0.5, [1, 2, 1]), (2.0, [6, 6, 6])])
def test_updates_keep_to_their_rate_of_frames(rate, due):
    algorithm = Algorithm(updates_per_frame=rate)
    assert [algorithm.updates_due(3) for _ in range(3)] == due


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


@pytest.mark.parametrize("normalise", [False, True])
def test_statistics_see_each_new_frame_once(normalise):
    off_policy, algorithm = learner(learning_starts=4, normalise_observations=normalise)
    for num_frames in (8, 6):
        new = batch(num_frames, masked=3)
        new["observation"] = torch.zeros(1, num_frames, 2)
        off_policy.learn(new, 0)
    assert algorithm.observed == (5 + 3 if normalise else 0)


def test_a_buffer_that_the_collector_fills_is_not_filled_twice():
    off_policy, algorithm = learner(extend=False, learning_starts=4, batch_size=4)
    off_policy.replay.extend(batch(8))
    off_policy.learn(batch(8), 0)
    assert len(off_policy.replay) == 8
    assert len(algorithm.sizes) == 8


def test_versions_are_those_of_the_samples():
    torch.manual_seed(0)
    off_policy, algorithm = learner(learning_starts=4, batch_size=4)
    first, second = stamped([3, 3, -1, 3]), stamped([4, 4, 4, 4])
    off_policy.learn(first, 3)
    assert set(off_policy.versions(first).tolist()) == {3, -1}
    metrics = off_policy.learn(second, 4)
    found = off_policy.versions(second).tolist()
    assert set(found) == {3, -1, 4}
    assert len(found) == 4 * 4
    assert metrics["train/gradient_steps"] == 4
    assert algorithm.sizes == [4] * 8


def test_versions_are_none_as_long_as_nothing_is_sampled():
    off_policy, _ = learner(learning_starts=8, batch_size=4)
    given = stamped([0, 0, 0, 0])
    off_policy.learn(given, 0)
    assert off_policy.versions(given).tolist() == []
    off_policy.learn(given, 0)
    assert len(off_policy.versions(given)) == 16
    held, _ = learner(learning_starts=4, batch_size=4, updates_per_frame=0.125)
    assert held.learn(given, 0)["train/gradient_steps"] == 0


def test_an_algorithm_need_not_know_its_ratios():
    class Own:
        policy = None

        def update(self, samples: TensorDict, version: int) -> dict[str, float]:
            return {}

    on_policy = Learner(Own())  # type: ignore[arg-type]
    given = stamped([0, 1, 2])
    given["collector", "mask"][0, 2] = False
    on_policy.learn(given, 3)
    assert on_policy.ratios is None
    assert on_policy.versions(given).tolist() == [0, 1]
