"""prime-rl's TrainSink: a queue that is swept whenever a batch may be cut from it."""

from __future__ import annotations

import asyncio
import itertools
import types
from typing import Any

from docs.max_staleness import foreign
from docs.max_staleness.record import BATCH, Record
from docs.max_staleness.setup import Setup

LIMIT = 2
TARGET_LAG = 1  # orchestrator.py:104
IN_FLIGHT = BATCH * (LIMIT + 1)
STUBS = ("prime_rl", "verifiers")
PLACE = "prime-rl/src/prime_rl/orchestrator/"


def setups() -> list[Setup]:
    """One setting."""
    stubs = (*STUBS, "torch")
    utils = foreign.load(foreign.cloned(f"{PLACE}utils.py"), stubs)
    own = {
        "min_fresh_version": utils.min_fresh_version,
        "episode_env_name": lambda episode: "env",
        "episode_group_id": lambda episode: episode.id,
        "train_work": lambda episode: episode,
    }
    contents = {
        "prime_rl.orchestrator.utils": own,
        "prime_rl.orchestrator.metrics": {"TrainEpisodes": Episodes},
        "prime_rl.orchestrator.types": {"TrainBatch": types.SimpleNamespace},
    }
    module = foreign.load(foreign.cloned(f"{PLACE}train_sink.py"), stubs, contents)
    module.iter_trainable_traces = lambda group: [(e, t) for e in group for t in e.traces]
    module.trace_to_samples = lambda trace, **options: [
        types.SimpleNamespace(number=trace.id, token_ids=[0])
    ]
    module.stamp_loss_routing = lambda *args: None
    module.asyncio = types.SimpleNamespace(to_thread=_at_once)

    async def run(record: Record) -> None:
        await _run(module, utils, record)

    return [
        Setup(
            framework="prime-rl 559b447",
            option=f"max_off_policy_steps={LIMIT}",
            limit=LIMIT,
            unit="updates",
            measured_at="use, when a batch is cut",
            promise=(
                "Maximum staleness of a trained rollout (default 8): the version a batch trains on "
                "minus the oldest version that generated the rollout, queue time included."
            ),
            source="docs/training.md:62",
            bound="max_off_policy_steps",
            most=LIMIT,
            theirs="TrainSink, min_fresh_version",
            ours="its dispatcher with groups of one, its orchestrator with TARGET_LAG, the trainer",
            run=run,
        )
    ]


class Episodes:
    """What arrived, which prime-rl keeps for its metrics."""

    def __init__(self, *args: Any, **options: Any):
        self.cancelled: set[Any] = set()

    def extend(self, *args: Any, **options: Any) -> None: ...


async def _at_once(function: Any, *args: Any, **options: Any) -> Any:
    return function(*args, **options)


async def _nothing(*args: Any) -> None: ...


async def _run(module: Any, utils: Any, record: Record) -> None:
    environment = types.SimpleNamespace(
        config=types.SimpleNamespace(group_size=1),
        algorithm=types.SimpleNamespace(
            finalize_episode=_nothing, finalize_group=_nothing, action_loss_type=None
        ),
        sampling_args={"temperature": 1.0},
    )
    progress = types.SimpleNamespace(step=1)
    sink = module.TrainSink(
        types.SimpleNamespace(
            max_off_policy_steps=LIMIT, train=types.SimpleNamespace(filter_zero_advantages=False)
        ),
        tokenizer=None,
        train_envs=types.SimpleNamespace(get=lambda name: environment),
        mm_token_type_ids_mapping=None,
        progress=progress,
        batch_size=BATCH,
        token_batch_size=None,
    )
    numbers = itertools.count()
    changed = asyncio.Condition()
    finished: asyncio.Queue[Any] = asyncio.Queue()
    batches: asyncio.Queue[list[int]] = asyncio.Queue()
    running: dict[int, tuple[asyncio.Task[None], int]] = {}

    async def roll(number: int, version: int) -> None:
        await asyncio.sleep(record.duration())
        del running[number]
        await finished.put(_episode(number, version))

    def lead() -> int:
        return progress.step - 1 - record.version

    def dispatch() -> None:
        while len(running) < IN_FLIGHT and lead() <= TARGET_LAG:
            number = next(numbers)
            record.act(number, record.version)
            task = asyncio.create_task(roll(number, record.version))
            running[number] = task, record.version

    async def orchestrate() -> None:
        while True:
            dispatch()
            queued = set(sink.pending_batch)
            episode = await finished.get()
            batch = await sink.add(episode)
            shipped = set() if batch is None else {s.number for s in batch.samples}
            for number in (queued | {episode.id}) - set(sink.pending_batch) - shipped:
                record.drop(number)
            if batch is None:
                continue
            async with changed:
                await changed.wait_for(lambda: record.version >= progress.step - 1 - TARGET_LAG)
            await batches.put(sorted(shipped))
            progress.step += 1

    async def cancel_stale() -> None:
        oldest = utils.min_fresh_version(progress.step, LIMIT)
        for number, (task, version) in list(running.items()):
            if version < oldest:
                task.cancel()
                del running[number]
                record.drop(number)

    orchestrating = asyncio.create_task(orchestrate())
    while not record.done:
        record.train(await batches.get())
        await asyncio.sleep(record.training())
        await cancel_stale()
        async with changed:
            record.trained()
            changed.notify_all()
        dispatch()
    for task in (orchestrating, *(task for task, _ in running.values())):
        task.cancel()


def _episode(number: int, version: int) -> Any:
    trace = types.SimpleNamespace(
        id=number,
        has_error=False,
        reward=0.0,
        num_total_tokens=1,
        task=types.SimpleNamespace(data=types.SimpleNamespace(idx=number)),
    )
    return types.SimpleNamespace(
        id=number,
        ok=True,
        traces=[trace],
        num_total_tokens=1,
        policy=types.SimpleNamespace(start=version, end=version),
        model_copy=lambda update: None,
    )
