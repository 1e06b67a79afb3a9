"""gymnasium's AsyncVectorEnv, as a contestant of the collection benchmark.

The bare loop over a process for each environment: as many as one worker has, or as all have.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.vector import AsyncVectorEnv

from benchmarks.collect_bare import VectorLoop
from benchmarks.collect_case import Case, build_policy, single_env
from benchmarks.collect_session import Session, serve, take_batches
from benchmarks.host import LeftOut

MAX_PROCESSES = 32


class AsyncVector(Session):
    """The policy in this process, each environment in another."""

    def __init__(self, case: Case, options: dict[str, Any]):
        assert not options, options
        num_envs = case.num_envs * case.workers
        if case.mode == "multi_async":
            raise LeftOut("it waits for all environments at every step")
        if num_envs > MAX_PROCESSES:
            raise LeftOut(f"AsyncVectorEnv would need {num_envs} processes")
        self.env = AsyncVectorEnv([single_env(case.env)] * num_envs)
        self.loop = VectorLoop(self.env, build_policy(case.env), case.steps)

    def turn(self, seconds: float) -> tuple[int, float]:
        return take_batches(self.loop, seconds)

    def close(self) -> None:
        self.env.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(AsyncVector)
