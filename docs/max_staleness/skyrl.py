"""SkyRL's _AsyncStalenessManager: admission by a count of groups, modelled after AReaL's."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from docs.max_staleness import foreign
from docs.max_staleness.record import BATCH, Record
from docs.max_staleness.setup import Setup

LIMIT = 2
WORKERS = BATCH * (LIMIT + 1)
STUBS = ("skyrl", "torch", "torchdata", "loguru", "tqdm", "ray")


def setups() -> list[Setup]:
    """One setting."""
    module = foreign.load(foreign.installed("skyrl/train/fully_async_trainer.py"), STUBS)

    async def run(record: Record) -> None:
        await _run(module, record)

    return [
        Setup(
            framework="SkyRL 0.4.0",
            option=f"max_staleness_steps={LIMIT}",
            limit=LIMIT,
            unit="updates",
            measured_at="admission, in groups",
            promise=(
                "If a trajectory group is scheduled at step *i* and trained at step *j*, then "
                "``j - i <= max_staleness_steps``. (config) A capacity rule, not a hard "
                "**per-group** staleness guarantee. (class)"
            ),
            source="train/config/config.py:1036-1037, train/fully_async_trainer.py:119-127",
            bound=f"{LIMIT} (config), none (class)",
            most=None,
            theirs="_AsyncStalenessManager",
            ours="the generation workers and the training loop of its trainer, in one epoch",
            run=run,
        )
    ]


async def _run(module: Any, record: Record) -> None:
    manager = module._AsyncStalenessManager(WORKERS, BATCH, LIMIT)
    buffer: asyncio.Queue[int] = asyncio.Queue(maxsize=BATCH * (LIMIT + 1))
    numbers = itertools.count()

    async def generate() -> None:
        while True:
            await manager.acquire_submission_slot()
            sample = next(numbers)
            record.act(sample, record.version)
            await asyncio.sleep(record.duration())
            buffer.put_nowait(sample)  # its own bound: never full
            await manager.on_rollout_accepted()

    workers = [asyncio.create_task(generate()) for _ in range(WORKERS)]
    while not record.done:
        record.train([await buffer.get() for _ in range(BATCH)])
        await asyncio.sleep(record.training())
        record.trained()
        await manager.notify_capacity_change(record.version + 1)
    for worker in workers:
        worker.cancel()
