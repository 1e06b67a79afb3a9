"""Factories that ask for their worker's number and a seed are called with them."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector

BOX = gym.spaces.Box(-1, 2.0**53, (2,), np.float64)


class Told(gym.Env[Any, Any]):
    """Shows what it was made with; kills its process once, if it is given a file to leave."""

    observation_space, action_space = BOX, gym.spaces.Discrete(2)

    def __init__(self, worker_idx: int, seed: int | None, once: Path | None = None):
        self.shown = np.array([worker_idx, -1 if seed is None else seed], np.float64)
        self.once, self.steps = once, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 15 and self.once is not None and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.shown, 0.0, False, False, {}


def told(collector: Any, batches: int = 2) -> list[tuple[int, int]]:
    """Worker and seed of every environment that frames came from, in the order of workers."""
    found: dict[tuple[int, int], None] = {}
    with collector:
        for _ in range(batches):
            for row in collector.next()["observation"].reshape(-1, 2).tolist():
                found[int(row[0]), int(row[1])] = None
    return sorted(found)


def build(kind: Any, make: Any = Told, **options: Any) -> Any:
    workers = {} if kind is Collector else {"num_workers": 2}
    return kind(make, None, frames_per_batch=20, **workers, **options)


KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]


@pytest.mark.parametrize("kind", KINDS)
def test_each_worker_is_told_its_number_and_a_seed_that_follows_from_the_collectors(kind):
    batches = 12 if kind is MultiAsyncCollector else 1
    found = told(build(kind, seed=3), batches)
    assert [worker for worker, _ in found] == ([0] if kind is Collector else [0, 1])
    assert len({seed for _, seed in found}) == len(found)
    assert all(0 <= seed < 2**31 for _, seed in found)
    assert told(build(kind, seed=3), batches) == found
    assert set(told(build(kind, seed=4), batches)).isdisjoint(found)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_arguments_that_are_given_otherwise_stay(kind):
    batches = 1
    (*_, (_, seed)) = told(build(kind, create_env_kwargs={"seed": 7}), batches)
    assert seed == 7
    (*_, (_, seed)) = told(build(kind, functools.partial(Told, seed=8)), batches)
    assert seed == 8
    found = told(build(kind, lambda worker_idx=5, seed=9: Told(worker_idx, seed)), batches)
    assert found == [(5, 9)]


def test_a_default_of_none_is_replaced():
    (found,) = told(build(Collector, lambda worker_idx=None, seed=None: Told(worker_idx, seed)))
    assert found[0] == 0
    assert found[1] >= 0


def test_a_replaced_worker_is_told_another_seed(tmp_path):
    kwargs = [{"once": None}, {"once": tmp_path / "died"}]
    collector = build(
        MultiSyncCollector, create_env_kwargs=kwargs, on_worker_failure="restart", seed=3
    )
    found = told(collector, 4)
    assert [worker for worker, _ in found] == [0, 1, 1]
    assert len({seed for _, seed in found}) == 3


@pytest.mark.parametrize("seed", [-1, 1.5, "3", True])
def test_seeds_that_are_no_whole_numbers_are_refused(seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        build(Collector, seed=seed)
