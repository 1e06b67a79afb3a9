"""torchrl's collectors, as a contestant of the collection benchmark.

The policy is the network itself in a TensorDictModule, with sampling inside: torchrl's own
probabilistic modules do the same work more slowly. `options` holds what makes a setting: `env`, one
of `ENVIRONMENTS`, and arguments of the collector. The driver tries several and takes the fastest.

torchrl refuses environments that reset in the step after the last, so gymnasium's native vector of
CartPole, which knows no other way, is not among them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase, GymEnv, GymWrapper, ParallelEnv, SerialEnv
from torchrl.weight_update import SharedMemWeightSyncScheme

from benchmarks.collect_case import WORKERS, Case, build_policy, single_env, step_weights
from benchmarks.collect_session import Session, serve, take_batches


def gym_env(name: str, num_envs: int) -> EnvBase:
    """One environment."""
    assert num_envs == 1
    return GymEnv(name, categorical_action_encoding=True)


def gym_async(name: str, num_envs: int) -> EnvBase:
    """gymnasium's AsyncVectorEnv, which is what `num_envs` means to torchrl."""
    return GymEnv(name, num_envs=num_envs, categorical_action_encoding=True)


def gym_sync(name: str, num_envs: int) -> EnvBase:
    """gymnasium's SyncVectorEnv, in the autoreset mode that torchrl prefers."""
    envs = SyncVectorEnv([single_env(name)] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    return GymWrapper(envs, categorical_action_encoding=True)


def serial(name: str, num_envs: int) -> EnvBase:
    return SerialEnv(num_envs, functools.partial(gym_env, name, 1))


def parallel(name: str, num_envs: int) -> EnvBase:
    return ParallelEnv(num_envs, functools.partial(gym_env, name, 1))


ENVIRONMENTS: dict[str, Callable[[str, int], EnvBase]] = {
    "GymEnv": gym_env,
    "AsyncVectorEnv": gym_async,
    "SyncVectorEnv": gym_sync,
    "SerialEnv": serial,
    "ParallelEnv": parallel,
}


class TorchRL(Session):
    """A collector of torchrl."""

    def __init__(self, case: Case, options: dict[str, Any]):
        settings = dict(options)
        make = functools.partial(ENVIRONMENTS[settings.pop("env")], case.env, case.num_envs)
        network = build_policy(case.env)
        self.policy, self.published = (
            TensorDictModule(
                network, in_keys=list(network.in_keys), out_keys=list(network.out_keys)
            ),
            0,
        )
        begun = time.perf_counter()
        if case.mode == "single":
            self.workers = 0
            self.collector = Collector(
                make,
                self.policy,
                frames_per_batch=case.batch_frames,
                total_frames=-1,
                device="cpu",
                **settings,
            )
        else:
            self.workers = WORKERS
            waits = case.mode == "multi_sync"
            kind = MultiSyncCollector if waits else MultiAsyncCollector
            self.collector = kind(
                [make] * WORKERS,
                self.policy,
                frames_per_batch=case.batch_frames,
                total_frames=-1,
                device="cpu",
                weight_sync_schemes={"policy": SharedMemWeightSyncScheme(sync=waits)},
                **settings,
            )
        self.batches = iter(self.collector)
        first = next(self.batches)
        self.first_batch_s = time.perf_counter() - begun
        assert first.numel() == case.batch_frames, (first.shape, case.batch_frames)
        assert "action_log_prob" in first.keys()  # noqa: SIM118  (a TensorDict iterates its rows)

    def next_batch(self) -> int:
        """The frames of one more batch, which goes with an update of the workers' weights."""
        if self.workers:
            self.published += 1
            step_weights(self.policy, self.published)
            self.collector.update_policy_weights_()
        return next(self.batches).numel()

    def turn(self, seconds: float) -> tuple[int, float]:
        return take_batches(self.next_batch, seconds, ahead=2 * self.workers + 1)

    def close(self) -> None:
        self.collector.shutdown()


if __name__ == "__main__":
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    torch.set_num_threads(1)
    serve(TorchRL)
