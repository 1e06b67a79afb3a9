"""The probe of the collectors' promise suite: frames that say which weights computed them.

Every tensor of the policy holds the number of its version, and beside the action it puts out the
lowest and the highest number that it finds. Two different ones on a frame: it was torn. Another
than `policy_version`: the stamp is wrong.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

COLLECTORS: dict[str, type[BaseCollector]] = {
    "single": Collector,
    "multi_sync": MultiSyncCollector,
    "multi_async": MultiAsyncCollector,
}
SCHEMES: dict[str, Callable[..., Any]] = {
    "shared_mem": SharedMemWeightSyncScheme,
    "multiprocess": MultiProcessWeightSyncScheme,
}


class VersionPolicy(nn.Module):
    """Acts at random, and tells what its parameters and buffers say."""

    in_keys = ("observation",)
    out_keys = ("action", "low", "high")

    def __init__(self, width: int = 32, layers: int = 3):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.hold(0)

    def hold(self, number: int) -> None:
        """What a training step would do, in place."""
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(number)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = observation.shape[0]
        pairs = [torch.aminmax(t.detach()) for t in (*self.parameters(), *self.buffers())]
        low = min(pair.min.item() for pair in pairs)
        high = max(pair.max.item() for pair in pairs)
        action = torch.randint(0, 2, (count,))
        return action, torch.full((count,), low), torch.full((count,), high)


def make_cartpole(num_envs: int = 2) -> gym.vector.VectorEnv[Any, Any, Any]:
    return gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")


class Judge:
    """Counts frames, and what is wrong with them."""

    def __init__(self) -> None:
        self.frames = 0
        self.torn = 0
        self.wrong_stamps = 0
        self.backwards = 0
        self.mixed_batches = 0
        self.versions: set[int] = set()
        self.by_worker: dict[int, list[int]] = defaultdict(list)  # versions of each batch's ends
        self._last: dict[int, int] = defaultdict(int)

    def take(self, batch: TensorDictBase) -> None:
        mask = batch["collector", "mask"]
        low, high, stamps = batch["low"], batch["high"], batch["policy_version"]
        self.frames += int(mask.sum())
        self.torn += int(((low != high) & mask).sum())
        self.wrong_stamps += int(((low != stamps) & mask).sum())
        for worker in batch["collector", "worker"].unique().tolist():
            rows = (batch["collector", "worker"] == worker)[:, 0]
            mine = stamps[rows]
            seen = mine[mask[rows]]
            self.versions.update(seen.unique().tolist())
            self.mixed_batches += len(seen.unique()) > 1
            self.backwards += int((mine[:, 1:] < mine[:, :-1]).sum())
            self.backwards += int(seen.min()) < self._last[worker]
            self._last[worker] = int(seen.max())
            self.by_worker[worker] += [int(seen.min()), int(seen.max())]

    def violations(self) -> dict[str, int]:
        found = {
            "torn": self.torn,
            "wrong stamps": self.wrong_stamps,
            "backwards": self.backwards,
        }
        return {name: count for name, count in found.items() if count}


class Trainer:
    """Training steps in place, each published as the next version."""

    def __init__(self, collector: BaseCollector, policy: VersionPolicy):
        self.collector = collector
        self.policy = policy

    def publish(self, **how: Any) -> int:
        version = int(self.collector.publisher.version) + 1
        self.policy.hold(version)
        self.collector.update_policy_weights_(**how)
        return version


@contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Do `work` again and again in another thread; what it raises is raised at the end."""
    stop = threading.Event()
    raised: list[BaseException] = []

    def repeat() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60.0)
        assert not thread.is_alive(), "the other thread is stuck"
    if raised:
        raise raised[0]


def balance(collector: BaseCollector) -> int:
    """How many frames are unaccounted for."""
    stats = collector.stats()
    found: int = stats["collected"] - stats["delivered"] - stats["dropped"] - stats["in_flight"]
    return found
