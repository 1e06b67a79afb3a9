"""torchtitan's RolloutGroupWorkBuffer: slots that are freed after the weights have arrived."""

from __future__ import annotations

import asyncio
import types
from typing import Any

from docs.max_staleness import foreign
from docs.max_staleness.record import BATCH, Record
from docs.max_staleness.setup import Setup

STEPS = 2
PULL = 0.2  # how long weights travel, in units of a training step


def load() -> Any:
    """The module of the buffer."""
    path = foreign.installed("torchtitan/experiments/rl/components/work_buffer.py")
    trace = types.SimpleNamespace(
        log_trace_span=lambda _: lambda method: method, log_trace_scalar=lambda _: None
    )
    contents = {"torchtitan.observability": {"structured_logger": trace}}
    return foreign.load(path, ("torchtitan",), contents)


def setups() -> list[Setup]:
    """Strict FIFO, and the default window."""
    module = load()
    slots = (STEPS + 1) * BATCH
    return [_setup(module, slots, window) for window in (None, 0.3)]


def _setup(module: Any, slots: int, fraction: float | None, early: bool = False) -> Setup:
    window = 1 if fraction is None else max(1, int(fraction * slots))

    async def run(record: Record) -> None:
        await _run(module, record, slots, window, early)

    return Setup(
        framework="torchtitan 0.3.0",
        option=f"target_offpolicy_steps={STEPS}, window_fraction={fraction}",
        limit=STEPS,
        unit="updates",
        measured_at="admission, in slots of a FIFO with a window",
        promise=(
            "With strict FIFO, observed offpolicy steps cannot exceed this target."
            if fraction is None
            else "With windowed FIFO, it may exceed this target, up to `max_offpolicy_steps`."
        ),
        source="experiments/rl/controller.py:171-173",
        bound="(B + W - 2) // P",
        most=(slots + window - 2) // BATCH,
        theirs="RolloutGroupWorkBuffer",
        ours="the loops of its controller, without the packing of batches",
        run=run,
    )


def planted() -> Setup:
    """A fault that the table must show: slots are freed before the training step."""
    return _setup(load(), (STEPS + 1) * BATCH, None, early=True)


async def _run(module: Any, record: Record, slots: int, window: int, early: bool) -> None:
    buffer = module.RolloutGroupWorkBuffer(
        None, max_active_rollout_groups=slots, window_size=window
    )
    batches: asyncio.Queue[list[int]] = asyncio.Queue(maxsize=1)
    pulled = 0

    async def feed() -> None:
        sample = 0
        while await buffer.wait_for_slot():
            await buffer.add_work(module.RolloutGroupWork(group_id=sample, sample=None))
            sample += 1

    async def roll() -> None:
        while (work := await buffer.claim_next()) is not None:
            record.act(work.group_id, pulled)
            await asyncio.sleep(record.duration())
            await buffer.finalize_work(types.SimpleNamespace(group_id=work.group_id))

    async def batch() -> None:
        while True:
            groups = [await buffer.take_finalized() for _ in range(BATCH)]
            if None in groups:
                return
            await batches.put([group.group_id for group in groups])

    async def pull(version: int) -> None:
        nonlocal pulled
        await asyncio.sleep(PULL)
        pulled = version
        if not early:
            await buffer.release_active_groups(BATCH, reason="trained")

    async def train() -> None:
        pulling = None
        while not record.done:
            samples = await batches.get()
            if early:
                await buffer.release_active_groups(BATCH, reason="trained")
            record.train(samples)
            await asyncio.sleep(record.training())
            record.trained()
            if pulling is not None:
                await pulling
            pulling = asyncio.create_task(pull(record.version))
        await buffer.close()

    tasks = [asyncio.create_task(part()) for part in (feed, batch, *[roll] * slots)]
    await train()
    for task in tasks:
        task.cancel()
