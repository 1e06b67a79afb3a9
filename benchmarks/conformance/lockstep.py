"""The adapter of Lockstep: its schemes of one machine, and its asynchronous collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gymnasium as gym

from collectors import MultiAsyncCollector
from sync import (
    HogwildWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from .frames import Collecting, Frame
from .processes import Seen, with_processes
from .weights import CartPolePolicy, NumberedModel

LIBRARY = "Lockstep"
MakeScheme = Callable[[], WeightSyncScheme]


class Trainer:
    """Sends with a scheme that waits until every worker uses the version."""

    def __init__(self, make_scheme: MakeScheme, model: NumberedModel, workers: int, context: Any):
        self.handout = make_scheme()
        self.handout.init_on_sender(model=model, devices=["cpu"] * workers, ctx=context)

    def connect(self) -> None:
        self.handout.connect()

    def publish(self, model: NumberedModel, worker_ids: list[int] | None) -> None:
        self.handout.send(model, worker_ids)

    def close(self) -> None:
        self.handout.shutdown()


class Worker:
    """Takes what is new before each call."""

    def __init__(self, scheme: WeightSyncScheme, model: NumberedModel, index: int):
        self._scheme = scheme
        scheme.init_on_receiver(model=model, worker_idx=index)
        scheme.connect(background=False)

    def step(self, call: Callable[[], Seen]) -> tuple[int, Seen]:
        self._scheme.receive()
        return self._scheme.version, call()


class Collector(Collecting):
    """`MultiAsyncCollector` on CartPole."""

    def __init__(self, make_scheme: MakeScheme, num_workers: int, width: int):
        super().__init__()
        policy = CartPolePolicy(width)
        policy.in_keys, policy.out_keys = ("observation",), policy.outputs
        self.model = policy.weights
        self._width = width
        self._collector = MultiAsyncCollector(
            partial(gym.make_vec, "CartPole-v1", num_envs=1, vectorization_mode="sync"),
            policy,
            num_workers=num_workers,
            frames_per_batch=50,
            weight_sync_schemes={"policy": make_scheme()},
        )
        found: dict[int, int] = {}
        while len(found) < num_workers:
            batch = self._collector.next()
            found[int(batch["collector", "worker"].flatten()[0])] = int(batch["pid"].flatten()[0])
        self.pids = [found[worker] for worker in range(num_workers)]

    def next_frames(self) -> Iterable[Frame]:
        batch = self._collector.next()
        names = ("pid", "policy_version", "low", "high")
        return map(Frame, *(batch[name].flatten().tolist() for name in names))

    def publish(self, model: NumberedModel, worker_ids: list[int] | None) -> None:
        if model is self.model:
            self._collector.update_policy_weights_(worker_ids=worker_ids)
            return
        policy = CartPolePolicy(self._width)
        policy.weights = model
        self._collector.update_policy_weights_(policy, worker_ids=worker_ids)

    def close(self) -> None:
        self._collector.shutdown()


MAKE: dict[str, MakeScheme] = {
    "shared_mem": SharedMemWeightSyncScheme,
    "shared_mem, zero_copy": partial(SharedMemWeightSyncScheme, zero_copy=True),
    "multiprocess": MultiProcessWeightSyncScheme,
    "hogwild (no copies, on purpose)": HogwildWeightSyncScheme,
}
SCHEMES: dict[str, Any] = {
    name: with_processes(partial(Trainer, make), Worker) for name, make in MAKE.items()
}
SCHEMES |= {
    f"{name}, asynchronous collector": partial(Collector, MAKE[name])
    for name in ("shared_mem", "multiprocess")
}
