"""TRL's RolloutQueueDataset: stale samples are dropped when they are pulled."""

from __future__ import annotations

import collections
import itertools
import logging
import queue
import types
from collections.abc import Iterator
from typing import Any

from docs.max_staleness import foreign
from docs.max_staleness.record import BATCH, Record
from docs.max_staleness.setup import Setup
from docs.max_staleness.simulation import Simulation

LIMIT = 2
STUBS = ("trl", "transformers", "accelerate", "datasets", "torch", "trackio", "requests", "peft")


class Pulled:
    """Base of the dataset, in place of torch's, which does nothing for a plain iteration."""


def setups() -> list[Setup]:
    """One setting."""
    data = types.SimpleNamespace(IterableDataset=Pulled)
    contents = {"torch": {"utils": types.SimpleNamespace(data=data)}}
    name = "trl.experimental.async_grpo.async_grpo_trainer"
    path = foreign.installed(f"{name.replace('.', '/')}.py")
    module = foreign.load(path, STUBS, contents, name)
    logging.getLogger(module.__name__).setLevel(logging.ERROR)

    async def run(record: Record) -> None:
        record.time = _run(module, record)

    return [
        Setup(
            framework="TRL 1.16.0",
            option=f"max_staleness={LIMIT}, token_budget=-1",
            limit=LIMIT,
            unit="syncs of weights",
            measured_at="pull from the queue, a batch ahead",
            promise=(
                "Maximum number of weight update steps a rollout sample can lag behind the current "
                "model version before being discarded."
            ),
            source="experimental/async_grpo/async_grpo_config.py:127-128",
            bound="max_staleness",
            most=LIMIT,
            theirs="RolloutQueueDataset",
            ours="its rollout worker; accelerate's loader, which pulls a batch ahead; the trainer",
            run=run,
        )
    ]


class Worker:
    """As many rollouts at once as TRL sets by default, into a queue that the dataset reads."""

    def __init__(self, time: Simulation, record: Record):
        self._time, self._record = time, record
        self._numbers = itertools.count()
        self._samples: collections.deque[Any] = collections.deque()
        self.pulled: dict[Any, int] = {}

    def start(self) -> None:
        """Begin one rollout, which begins the next when it ends."""
        number, version = next(self._numbers), self._record.version
        self._record.act(number, version)

        def finish() -> None:
            self._samples.append(_sample(number, version))
            self.start()

        self._time.after(self._record.duration(), finish)

    def get(self, timeout: float) -> Any:
        """As `queue.Queue.get`."""
        if not self._time.wait(lambda: bool(self._samples), timeout):
            raise queue.Empty
        return self._samples.popleft()

    def qsize(self) -> int:
        return len(self._samples)


def _sample(number: int, version: int) -> Any:
    nothing = dict.fromkeys(("input_ids", "completion_mask", "old_log_probs", "advantage"))
    return types.SimpleNamespace(
        group_id=number, model_version=version, enqueued_at=None, metrics={}, **nothing
    )


def _run(module: Any, record: Record) -> float:
    time = Simulation(record.seed)
    worker = Worker(time, record)
    module.time = types.SimpleNamespace(time=lambda: time.now)
    dropped = _Count()
    dataset = module.RolloutQueueDataset(
        worker,
        lambda: record.version,
        lambda limit: None,
        1e9,
        collections.defaultdict(list, {"sample/dropped_stale_total": dropped}),
        max_staleness=LIMIT,
    )
    for _ in range(LIMIT * BATCH):
        worker.start()
    for batch in _a_batch_ahead(iter(dataset)):
        record.train(batch)
        time.sleep(record.training())
        record.trained()
        record.dropped = dropped.count
        if record.done:
            return time.now
    raise AssertionError("the dataset ended")


def _a_batch_ahead(samples: Iterator[Any]) -> Iterator[list[int]]:
    """Batches, each after the next one is pulled: accelerate's data_loader.py:584 and :919."""
    batch = [next(samples)["group_id"] for _ in range(BATCH)]
    while True:
        following = [next(samples)["group_id"] for _ in range(BATCH)]
        yield batch
        batch = following


class _Count(list):  # type: ignore[type-arg]
    """Counts what is appended."""

    count = 0

    def append(self, value: Any) -> None:
        self.count += 1
