"""NeMo RL's staleness samplers over its TQReplayBuffer: one object admits, chooses and drops."""

from __future__ import annotations

import asyncio
import itertools
import types
from dataclasses import dataclass
from typing import Any

from docs.max_staleness import foreign
from docs.max_staleness.record import BATCH, Record
from docs.max_staleness.setup import Setup

LIMIT = 2
CAPACITY = BATCH * (LIMIT + 1)
POLL = 0.1  # of its loops, in units of a training step
PLACE = "nemo-rl/nemo_rl/algorithms/async_utils/"


@dataclass
class Meta:
    """The groups of a selection; in NeMo RL these are keys of its data plane."""

    sample_ids: list[str]

    def __init__(self, sample_ids: list[str], **others: Any):
        self.sample_ids = sample_ids

    def concat(self, *others: Meta) -> Meta:
        """This selection and others."""
        return Meta([*self.sample_ids, *(one for other in others for one in other.sample_ids)])


PROMISES = {
    "WindowedSampler": (
        "Max weight-version gap a selected group may have from the trainer.",
        "staleness_sampler.py:489",
        "use, in versions",
    ),
    "WeightFifoSampler": (
        "``select`` drains the oldest in-window ``start_weight`` first and waits for that weight's "
        "batch to fill.",
        "staleness_sampler.py:399",
        "admission, and use, in versions",
    ),
    "ReadyFirstSampler": (
        "How far generation may run ahead of the trainer, in dispatch batches. Every already-"
        "admitted group remains selectable.",
        "staleness_sampler.py:497, :392",
        "admission, in batches",
    ),
}


def setups() -> list[Setup]:
    """Three of its samplers."""
    stubs = ("nemo_rl", "ray", "torch")
    samplers = foreign.load(foreign.cloned(f"{PLACE}staleness_sampler.py"), stubs)
    samplers._GATE_POLL_SECONDS = POLL
    contents = {"nemo_rl.data_plane": {"KVBatchMeta": Meta}}
    buffers = foreign.load(foreign.cloned(f"{PLACE}replay_buffer.py"), stubs, contents)
    lengths = types.SimpleNamespace(tolist=lambda: [1])
    buffers.record_to_train_batch = lambda record, pad_value_dict: {"input_lengths": lengths}
    buffers.pack_payload = lambda batch, weight_version, group_id: ([group_id], {}, [{}])
    return [_setup(getattr(samplers, name), buffers.TQReplayBuffer) for name in PROMISES]


def _setup(sampler: Any, buffer: Any) -> Setup:
    promise, source, measured_at = PROMISES[sampler.__name__]
    hard = sampler.__name__ != "ReadyFirstSampler"

    async def run(record: Record) -> None:
        await _run(sampler, buffer, record)

    return Setup(
        framework="NeMo RL 7ea279a",
        option=f"{sampler.__name__}, max_staleness_versions={LIMIT}",
        limit=LIMIT,
        unit="updates",
        measured_at=measured_at,
        promise=promise,
        source=f"nemo_rl/algorithms/async_utils/{source}",
        bound="s" if hard else "none",
        most=LIMIT if hard else None,
        theirs=f"{sampler.__name__}, TQReplayBuffer",
        ours="the two pumps of its single controller",
        run=run,
    )


async def _nothing(*args: Any, **options: Any) -> None:
    pass


async def _run(kind: Any, buffer_kind: Any, record: Record) -> None:
    buffer = buffer_kind(None, "train", pad_value_dict={})
    buffer._call_dp = _nothing
    sampler = kind(buffer, max_staleness_versions=LIMIT)
    room, numbers = asyncio.Semaphore(CAPACITY), itertools.count()
    running: dict[str, tuple[asyncio.Task[None], int]] = {}

    async def roll(sample: int) -> None:
        version = record.version
        group = buffer.reserve(weight_version=version, group_id=str(sample))
        task = asyncio.current_task()
        assert task is not None
        running[group] = task, version
        record.act(sample, version)
        try:
            await asyncio.sleep(record.duration())
        except asyncio.CancelledError:
            if not record.done:
                await buffer.remove_group(group)
                record.drop(sample)
                room.release()
            raise
        finally:
            del running[group]
        await buffer.commit(group, None, version, record.version)

    async def pump() -> None:
        while True:
            await sampler.admit(trainer_version_fn=lambda: record.version)
            for _ in range(BATCH):
                await room.acquire()
                rollouts.add(asyncio.create_task(roll(next(numbers))))

    async def abort() -> None:
        stale = [
            task
            for task, version in running.values()
            if sampler.should_abort_inflight(
                start_weight_version=version, current_train_weight=record.version
            )
        ]
        for task in stale:
            task.cancel()
        await asyncio.gather(*stale, return_exceptions=True)

    async def evict() -> None:
        before = set(buffer._group_ids)
        for _ in range(await sampler.evict(current_train_weight=record.version)):
            room.release()
        for group in before - set(buffer._group_ids):
            record.drop(int(group))

    rollouts: set[asyncio.Task[None]] = set()
    pumping = asyncio.create_task(pump())
    while not record.done:
        await evict()
        chosen, _ = await sampler.select(
            current_train_weight=record.version, min_prompt_groups=BATCH, max_prompt_groups=BATCH
        )
        if chosen is None:
            await asyncio.sleep(POLL)
            continue
        for _ in range(BATCH):
            room.release()
        record.train([int(group) for group in chosen.sample_ids])
        await asyncio.sleep(record.training())
        record.trained()
        await abort()
    for task in (pumping, *rollouts):
        task.cancel()
