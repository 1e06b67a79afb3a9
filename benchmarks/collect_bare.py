"""The limit of the collection benchmark: environment and policy in a loop, and no collector.

Nothing is stored. With workers, each is such a loop in a process of its own, and their speeds are
added up: what the machine can do with that many processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv

from benchmarks.collect_case import WORKERS, Case, Policy, build_policy, make_env
from benchmarks.collect_session import Session, serve, take_batches

WAIT_S = 60.0


class VectorLoop:
    """A vector of environments that resets itself; a step that only reset is not a frame."""

    def __init__(self, env: VectorEnv, policy: Policy, steps: int):
        self.env, self.policy, self.steps = env, policy, steps
        self.observation, _ = env.reset(seed=0)
        self.num_resetting = 0

    @torch.no_grad()
    def __call__(self) -> int:
        frames = 0
        for _ in range(self.steps):
            action, _ = self.policy(torch.from_numpy(self.observation))
            self.observation, _, terminated, truncated, _ = self.env.step(action.numpy())
            frames += self.env.num_envs - self.num_resetting
            self.num_resetting = int(np.count_nonzero(terminated | truncated))
        return frames


class SingleLoop:
    """One environment."""

    def __init__(self, env: gymnasium.Env, policy: Policy, steps: int):
        self.env, self.policy, self.steps = env, policy, steps
        self.observation, _ = env.reset(seed=0)

    @torch.no_grad()
    def __call__(self) -> int:
        for _ in range(self.steps):
            action, _ = self.policy(torch.from_numpy(self.observation).unsqueeze(0))
            self.observation, _, terminated, truncated, _ = self.env.step(action.numpy()[0])
            if terminated or truncated:
                self.observation, _ = self.env.reset()
        return self.steps


def make_loop(case: Case) -> Callable[[], int]:
    """The loop for one worker of a case; a call takes the steps of one batch."""
    policy, env = build_policy(case.env), make_env(case.env, case.num_envs)
    if isinstance(env, VectorEnv):
        return VectorLoop(env, policy, case.steps)
    return SingleLoop(env, policy, case.steps)


class BareLoop(Session):
    """The loop in this process."""

    def __init__(self, case: Case):
        self.loop = make_loop(case)

    def turn(self, seconds: float) -> tuple[int, float]:
        return take_batches(self.loop, seconds)


class BareWorkers(Session):
    """The loop in several processes at once."""

    def __init__(self, case: Case):
        ctx = multiprocessing.get_context("forkserver")
        self.pipes = []
        for _ in range(WORKERS):
            ours, theirs = ctx.Pipe()
            ctx.Process(target=loop_on_request, args=(case, theirs), daemon=True).start()
            theirs.close()
            self.pipes.append(ours)
        self._answers()

    def turn(self, seconds: float) -> tuple[int, float]:
        for pipe in self.pipes:
            pipe.send(seconds)
        answers = self._answers(seconds)
        per_second = sum(frames / elapsed for frames, elapsed in answers)
        longest = max(elapsed for _, elapsed in answers)
        return round(per_second * longest), longest

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()

    def _answers(self, seconds: float = 0.0) -> list[Any]:
        for worker, pipe in enumerate(self.pipes):
            if not pipe.poll(WAIT_S + 2 * seconds):
                raise TimeoutError(f"bare worker {worker} said nothing for {WAIT_S:.0f} s")
        return [pipe.recv() for pipe in self.pipes]


def loop_on_request(case: Case, pipe: Connection) -> None:
    """A worker: ready, then a turn for every number of seconds that comes."""
    torch.set_num_threads(1)
    loop = make_loop(case)
    try:
        pipe.send("ready")
        while True:
            pipe.send(take_batches(loop, pipe.recv()))
    except (EOFError, OSError):
        return  # the parent closed its end, or died


def open_session(case: Case, options: dict[str, Any]) -> Session:
    assert not options, options
    return BareLoop(case) if case.mode == "single" else BareWorkers(case)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(open_session)
