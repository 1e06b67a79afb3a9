"""AReaL's StalenessManager: admission by a count of samples."""

from __future__ import annotations

import asyncio
import types
from dataclasses import dataclass
from typing import Any

from docs.max_staleness import foreign
from docs.max_staleness.record import BATCH, Record
from docs.max_staleness.setup import Setup

LIMIT = 2
CONCURRENT = 32


@dataclass
class Stat:
    """The four counts that its manager keeps; in AReaL a dataclass of the same fields."""

    accepted: int = 0
    enqueued: int = 0
    rejected: int = 0
    running: int = 0


def setups() -> list[Setup]:
    """One setting."""
    path = foreign.installed("areal/infra/staleness_manager.py")
    module = foreign.load(path, ("areal",), {"areal.api": {"RolloutStat": Stat}})

    async def run(record: Record) -> None:
        await _run(module, record)

    return [
        Setup(
            framework="AReaL 1.0.4",
            option=f"max_head_offpolicyness={LIMIT}",
            limit=LIMIT,
            unit="updates",
            measured_at="admission, in samples",
            promise=(
                "This ensures that by the time samples are consumed, they won't exceed the maximum "
                "allowed staleness."
            ),
            source="infra/staleness_manager.py:96-97",
            bound="η",
            most=LIMIT,
            theirs="StalenessManager",
            ours="its dispatcher: admits while there is capacity, trains on the oldest finished",
            run=run,
        )
    ]


async def _run(module: Any, record: Record) -> None:
    weights = types.SimpleNamespace(get_version=lambda: record.version)
    manager = module.StalenessManager(weights, CONCURRENT, BATCH, LIMIT)
    changed = asyncio.Condition()
    finished: list[int] = []
    rollouts: set[asyncio.Task[None]] = set()

    async def roll(sample: int) -> None:
        await asyncio.sleep(record.duration())
        async with changed:
            manager.on_rollout_accepted()
            finished.append(sample)
            changed.notify_all()

    async def admit() -> None:
        sample = 0
        while True:
            async with changed:
                await changed.wait_for(lambda: manager.get_capacity() > 0)
                manager.on_rollout_enqueued()
                manager.on_rollout_submitted()
                record.act(sample, record.version)
                rollouts.add(asyncio.create_task(roll(sample)))
                sample += 1

    admitting = asyncio.create_task(admit())
    while not record.done:
        async with changed:
            await changed.wait_for(lambda: len(finished) >= BATCH)
            finished.sort()  # by the time of their submission
            samples = [finished.pop(0) for _ in range(BATCH)]
        record.train(samples)
        await asyncio.sleep(record.training())
        async with changed:
            record.trained()
            changed.notify_all()
    for task in (admitting, *rollouts):
        task.cancel()
