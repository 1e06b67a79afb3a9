"""An environment that goes wrong once, in the way it is told to: `Trouble-v0`."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import parent_process
from typing import Any

import gymnasium as gym
import numpy as np

LENGTH = 20  # of an episode

# What step returns in place of an observation, a reward, an end.
GARBAGE: dict[str, tuple[str, Any]] = {
    "nan": ("observation", np.full(3, np.nan, np.float32)),
    "shape": ("observation", np.zeros(7, np.float32)),
    "text": ("observation", "no array"),
    "nothing": ("observation", None),
    "nan reward": ("reward", float("nan")),
    "text reward": ("reward", "much"),
    "no reward": ("reward", None),
    "text end": ("terminated", "perhaps"),
}
DEEDS = ("raise", "hang", "exit", "sys.exit", "segv", "interrupt", "memory")


class Trouble(gym.Env[Any, Any]):
    """In its call number `at` of `where` it does `what`, unless the file `once` is there."""

    observation_space = gym.spaces.Box(-1e3, 1e3, (3,), np.float32)

    def __init__(self, *, continuous: bool, where: str, what: str, at: int, once: str):
        self.action_space = (
            gym.spaces.Box(-1, 1, (1,), np.float32) if continuous else gym.spaces.Discrete(2)
        )
        self.where, self.what, self.at, self.once = where, what, at, once
        self.calls = dict.fromkeys(("make", "reset", "step", "close"), 0)
        self.steps = 0
        self._trouble("make")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        returned = self._trouble("reset")
        return returned.get("observation", self._observation()), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        returned = self._trouble("step")
        ended = returned.get("terminated", self.steps >= LENGTH)
        observation = returned.get("observation", self._observation())
        return observation, returned.get("reward", 1.0), ended, False, {}

    def close(self) -> None:
        self._trouble("close")

    def _observation(self) -> Any:
        return np.array([self.steps, 0, 1], np.float32)

    def _trouble(self, where: str) -> dict[str, Any]:
        """What to return instead of what is right, unless worse happens."""
        self.calls[where] += 1
        if where != self.where or self.calls[where] < self.at:
            return {}
        if self.what in ("hang", "exit") and parent_process() is None:
            return {}  # the one that the trainer makes to look at: nobody watches the trainer
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return {}
        if self.what in GARBAGE:
            return dict([GARBAGE[self.what]])
        misbehave(self.what)
        return {}


def misbehave(what: str) -> None:
    """Do something that no environment should."""
    if what == "raise":
        raise RuntimeError("the pole fell off")
    if what == "memory":
        raise MemoryError
    if what == "sys.exit":
        raise SystemExit(3)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "exit":
        os._exit(7)
    if what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    while what == "hang":
        time.sleep(3600)


gym.register("Trouble-v0", entry_point=Trouble)
