"""The adapter of Lockstep: its schemes of one machine, and its asynchronous collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gymnasium as gym
import torch

from collectors import MultiAsyncCollector, MultiSyncCollector
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


class LockstepTrainer:
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


class LockstepWorker:
    """Takes what is new before each call."""

    def __init__(self, scheme: WeightSyncScheme, model: NumberedModel, index: int):
        self._scheme = scheme
        scheme.init_on_receiver(model=model, worker_idx=index)
        scheme.connect(background=False)

    def step(self, call: Callable[[], Seen]) -> tuple[int, Seen]:
        self._scheme.receive()
        return self._scheme.version, call()


class LockstepCollector(Collecting):
    """`MultiAsyncCollector` on CartPole."""

    def __init__(self, make_scheme: MakeScheme, num_workers: int, width: int):
        super().__init__()
        policy = CartPolePolicy(width)
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


def train(
    make_scheme: MakeScheme, *, asynchronous: bool, updates: int, max_lag: int | None = 0
) -> list[float]:
    """REINFORCE with one worker, which waits for each version if the collector is asynchronous."""
    torch.manual_seed(0)
    policy = Sampling()
    optimiser = torch.optim.SGD(policy.parameters(), lr=3.0)
    waits: dict[str, Any] = {"max_lag": max_lag, "batches_ahead": 3} if asynchronous else {}
    kind: Any = MultiAsyncCollector if asynchronous else MultiSyncCollector
    sums = []
    with kind(
        partial(gym.make_vec, "CartPole-v1", num_envs=2, vectorization_mode="sync"),
        policy,
        num_workers=1,
        frames_per_batch=64,
        seed=0,
        weight_sync_schemes={"policy": make_scheme()},
        **waits,
    ) as collector:
        for _ in range(updates):
            batch = collector.next()
            scores = policy.network(batch["observation"]).log_softmax(-1)
            chosen = scores.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
            loss = -(chosen * batch["next", "reward"]).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            collector.update_policy_weights_()
            sums.append(float(policy.network.weight.detach().square().sum()))
    return sums


class Sampling(torch.nn.Module):
    """A policy that draws its actions."""

    in_keys, out_keys = ("observation",), ("action",)

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(self.network(observation).softmax(-1), 1).squeeze(-1)


MAKE: dict[str, MakeScheme] = {
    "shared_mem": SharedMemWeightSyncScheme,
    "shared_mem, zero_copy": partial(SharedMemWeightSyncScheme, zero_copy=True),
    "multiprocess": MultiProcessWeightSyncScheme,
    "hogwild (no copies, on purpose)": HogwildWeightSyncScheme,
}
SCHEMES: dict[str, Any] = {
    name: with_processes(partial(LockstepTrainer, make), LockstepWorker)
    for name, make in MAKE.items()
}
ASYNCHRONOUS = {
    f"{name}, asynchronous collector": MAKE[name] for name in ("shared_mem", "multiprocess")
}
SCHEMES |= {name: partial(LockstepCollector, make) for name, make in ASYNCHRONOUS.items()}
TRAINERS = {name: partial(train, make) for name, make in ASYNCHRONOUS.items()}
