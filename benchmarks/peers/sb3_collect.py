"""stable-baselines3's rollouts, as a contestant of the collection benchmark.

`collect_rollouts` is the same function in all its on-policy algorithms. Its policy cannot do
without a value, so that is a single layer here; its actor is 64×64 with tanh as everybody's.
Without workers it steps a DummyVecEnv, with workers a SubprocVecEnv, which has a process for each
environment. It knows no vector environments of gymnasium's and no asynchronous collection.
"""

from __future__ import annotations

from typing import Any

import torch
from stable_baselines3 import A2C
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from benchmarks.collect_case import Case, single_env
from benchmarks.collect_session import Session, serve, take_batches
from benchmarks.host import LeftOut
from benchmarks.peers.gymnasium_collect import MAX_PROCESSES


class StableBaselines(Session):
    """A2C's rollouts into its own buffer, again and again; nothing is learnt."""

    def __init__(self, case: Case, options: dict[str, Any]):
        assert not options, options
        num_envs = case.num_envs * case.workers
        if case.mode == "multi_async":
            raise LeftOut("it has no asynchronous collection")
        if case.mode != "single" and num_envs > MAX_PROCESSES:
            raise LeftOut(f"SubprocVecEnv would need {num_envs} processes")
        envs = [single_env(case.env)] * num_envs
        if case.mode == "single":
            vector: VecEnv = DummyVecEnv(envs)
        else:
            vector = SubprocVecEnv(envs, start_method="fork")  # as fast as any, and ready sooner
        self.algorithm = A2C(
            "MlpPolicy",
            vector,
            n_steps=case.steps,
            policy_kwargs={"net_arch": {"pi": [64, 64], "vf": []}},
            device="cpu",
            seed=0,
        )
        _, self.callback = self.algorithm._setup_learn(total_timesteps=1)
        self.frames = case.steps * num_envs

    def next_batch(self) -> int:
        algorithm = self.algorithm
        complete = algorithm.collect_rollouts(
            algorithm.env, self.callback, algorithm.rollout_buffer, algorithm.n_steps
        )
        assert complete
        return self.frames

    def turn(self, seconds: float) -> tuple[int, float]:
        return take_batches(self.next_batch, seconds)

    def close(self) -> None:
        self.algorithm.env.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(StableBaselines)
