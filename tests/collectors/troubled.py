"""Environments and policies that go wrong when they are told to, and how tests look at workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from collectors.workers import pool
from sync.local.waiting import awake_s
from tests.collectors.support import COLLECTORS

WAIT_S = 30.0


class Troubled(gym.Env[Any, Any]):
    """Counts steps; in its `at`-th call of `where` it does `what`, if it is in worker `only`.

    once: a path; whoever finds nothing there makes it and is troubled, all others are not.
    """

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self,
        worker: int = 0,
        *,
        only: int = 0,
        where: str = "never",
        what: str = "raise",
        at: int = 1,
        once: str | None = None,
    ):
        self.worker, self.only, self.where, self.what, self.at = worker, only, where, what, at
        self.once = once
        self.calls: dict[str, int] = {}
        self.steps = 0
        self.seeded: list[int] = []
        self.lock = threading.Lock()  # travels to nobody
        self._trouble("make")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.seeded.append(seed)
        self.steps = 0
        spoiled = self._trouble("reset")
        return self._observation() if spoiled is None else spoiled, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        spoiled = self._trouble("step")
        observation = self._observation() if spoiled is None else spoiled
        return observation, 1.0, self.steps % 13 == 0, False, {}

    def close(self) -> None:
        self._trouble("close")

    def _observation(self) -> Any:
        return np.array([self.worker, self.steps], np.float32)

    def _trouble(self, where: str) -> Any:
        self.calls[where] = self.calls.get(where, 0) + 1
        wanted = where == self.where and self.worker == self.only
        if not wanted or self.calls[where] < self.at or not self._is_first():
            return None
        return TROUBLES[self.what]()

    def _is_first(self) -> bool:
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Mishap(Exception):
    """What goes wrong on purpose."""


def _raise() -> None:
    raise Mishap("the pole fell off")


def _hang() -> None:
    while True:
        time.sleep(3600)


TROUBLES: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "hang": _hang,
    "exit": lambda: os._exit(7),
    "sys.exit": lambda: (_ for _ in ()).throw(SystemExit(3)),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "shape": lambda: np.zeros((3,), np.float32),
    "dtype": lambda: np.zeros((2,), np.int64),
    "nan": lambda: np.full((2,), np.nan, np.float32),
    "none": lambda: "no array",
}


class Plain(nn.Module):
    """A policy with a weight, which it puts out; it fails from call number `fail_at` on."""

    in_keys = ("observation",)
    out_keys = ("action", "weight")

    def __init__(self, fail_at: int | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.fail_at, self.calls = fail_at, 0

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise Mishap("no action comes to mind")
        count = len(observation)
        return torch.zeros(count, dtype=torch.int64), self.weight.expand(count).clone()


class ActorCritic(nn.Module):
    """Two models in one, which put their weights out."""

    in_keys = ("observation",)
    out_keys = ("action", "weight", "value")

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = Plain(), Plain()

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        action, weight = self.actor(observation)
        return action, weight, self.critic(observation)[1]


def hold(policy: Plain, number: float) -> None:
    with torch.no_grad():
        policy.weight.fill_(number)


def told(count: int, **trouble: Any) -> list[dict[str, Any]]:
    """`create_env_kwargs` for so many workers."""
    return [{"worker": worker, **trouble} for worker in range(count)]


def make(
    kind: str,
    policy: Any = None,
    *,
    workers: int = 2,
    trouble: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A collector of troubled environments; it is the last worker's that goes wrong."""
    count = 1 if kind == "single" else workers
    each = told(count, only=count - 1, **(trouble or {}))
    options |= {"create_env_kwargs": each[0]} if kind == "single" else {"num_workers": workers}
    options.setdefault("create_env_kwargs", each)
    options.setdefault("frames_per_batch", 40)
    return COLLECTORS[kind](Troubled, policy or Plain(), **options)


def pids(collector: Any) -> list[int]:
    """The worker processes."""
    return [worker["pid"] for worker in collector.stats()["workers"]]


def balance(collector: Any) -> int:
    """How many frames are unaccounted for."""
    stats = collector.stats()
    found: int = stats["collected"] - stats["delivered"] - stats["dropped"] - stats["in_flight"]
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


class PoolClock:
    """The clock by which a pool judges its workers' silence; a test puts it forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ahead_s = 0.0
        self._looks = 0
        look_at_all = pool.WorkerPool._watch

        def look(of_pool: pool.WorkerPool) -> None:
            look_at_all(of_pool)
            self._looks += 1

        monkeypatch.setattr(pool.WorkerPool, "_watch", look)
        monkeypatch.setattr(pool, "awake_s", lambda: awake_s() + self.ahead_s)

    def await_look(self) -> None:
        """Wait until the pool has looked at all workers once more."""
        before = self._looks
        wait_until(lambda: self._looks > before + 1)  # one may just have been under way

    @contextmanager
    def put_forward(
        self, seconds: float, once: Callable[[], object], then: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Meanwhile, put it forward `once` this is so and the pool has seen it; what comes then."""

        def put_forward() -> None:
            wait_until(lambda: bool(once()))
            self.await_look()
            self.ahead_s += seconds
            then()

        thread = threading.Thread(target=put_forward)
        thread.start()
        try:
            yield
        finally:
            thread.join()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
