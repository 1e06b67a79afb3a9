"""The environments, the policy and the trainer of a story, and what they witness.

Every frame says by itself who made it (an observation is the number of the environment, over all
processes, and how many steps it had made) and which weights acted: all numbers of a version are
equal, and the policy puts out the smallest and the largest that it reads. So the trace has the
version that acted, whatever the collector says, and a call with torn weights shows two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from tests.virtual import modules
from tests.virtual.kernel import Process

ENVS_OF_PROCESS = 16
current: World | None = None


def world() -> World:
    assert current is not None
    return current


class Trouble(RuntimeError):
    """What an environment raises."""


@dataclass
class World:
    """What happened in a story, as seen from outside of the collector.

    step_s: the longest time that a step of an environment takes.
    troubles: by worker, what its environment does in its next step.
    refusals: how often the next worker cannot apply a version.
    """

    step_s: float = 0.001
    versions: dict[int, int] = field(default_factory=dict)  # the number in the weights, by version
    events: list[dict[str, Any]] = field(default_factory=list)  # the trace
    findings: list[str] = field(default_factory=list)
    excuses: list[str] = field(default_factory=list)  # faults after which the run may fail
    marks: set[str] = field(default_factory=set)  # what occurred, for `sometimes.py`
    made: dict[int, int] = field(default_factory=dict)  # steps of each process
    floors: dict[int, int] = field(default_factory=dict)  # weights that a process has acknowledged
    troubles: dict[int, str] = field(default_factory=dict)
    refusals: int = 0
    numbers: dict[int, int] = field(default_factory=dict)  # environments of each process
    taken: dict[int, int] = field(default_factory=dict)  # by environment, the steps that were taken
    number: int = 0  # in the newest weights
    collector: Any = None
    interrupts: int = 0

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def find(self, text: str) -> None:
        self.findings.append(text)

    def new_environment(self) -> int:
        pid = modules.kernel().process.pid
        index = self.numbers[pid] = self.numbers.get(pid, -1) + 1
        return pid * ENVS_OF_PROCESS + index

    def act(self, low: float, high: float) -> None:
        """A policy call, at the moment of the call."""
        process = modules.kernel().process
        floor = self.floors.get(process.pid, 0)
        if low < floor:
            self.find(f"{process} acts with weights {low:g} after it had acknowledged {floor}")
        if high > self.number:
            self.find(f"{process} acts with weights {high:g}, and the newest are {self.number}")


def index_of(process: Process) -> int:
    """The number of the worker that a process serves as."""
    return int(process.name.rpartition("-")[2])


class Witness(gym.Env[Any, Any]):
    """Its observation: its number, and the steps that it has made."""

    observation_space = gym.spaces.Box(0, 1e7, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.number = world().new_environment()
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        here, kernel = world(), modules.kernel()
        kernel.sleep(here.step_s * kernel.random.random())
        self._trouble()
        here.made[kernel.process.pid] = here.made.get(kernel.process.pid, 0) + 1
        reward = float(self.number + self.steps)
        self.steps += 1
        ended = self.steps % 5 == 0
        return self._observation(), reward, ended and self.steps % 2 == 0, ended, {}

    def _trouble(self) -> None:
        kernel = modules.kernel()
        what = world().troubles.pop(index_of(kernel.process), "")
        if what:
            kernel.note(f"the environment of {kernel.process}: {what}")
        if what == "raise":
            raise Trouble("the pole fell off")
        if what == "sys.exit":
            raise SystemExit(3)
        if what == "exit":
            modules.exit_process(7)
        if what == "hang":
            kernel.sleep(1e6)

    def _observation(self) -> Any:
        return np.array([self.number, self.steps], np.float32)


class Numbers(nn.Module):
    """A policy all of whose tensors, and its extra state, hold the number of its weights."""

    in_keys = ("observation",)
    out_keys = ("action", "low", "high")

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5))
        self.second = nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("third", torch.zeros(2))
        self.extra = 0

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        here = world()
        kernel = modules.kernel()
        if here.refusals and kernel.process.name != "trainer":
            here.refusals -= 1
            here.marks.add("a worker refuses a version")
            kernel.note(f"{kernel.process} cannot apply {state}")
            raise Trouble(f"no room for {state}")
        self.extra = state

    def fill(self, number: float) -> None:
        with torch.no_grad():
            for tensor in (self.first, self.second, self.third):
                modules.kernel().step("fill")
                tensor.fill_(number)
        self.extra = 0 if math.isnan(number) else int(number)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kernel = modules.kernel()
        numbers = [float(self.extra)]
        for tensor in (self.first, self.second, self.third):
            kernel.step("use")
            numbers += [tensor.min().item(), tensor.max().item()]
        low, high = min(numbers), max(numbers)
        world().act(low, high)
        rows = observation[:, 0]
        return (
            (observation[:, 1] % 2).long(),
            torch.full_like(rows, low),
            torch.full_like(rows, high),
        )
