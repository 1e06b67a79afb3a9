"""verl's ReplayBufferAsync: a group that spans too many versions is dropped, or waited for."""

from __future__ import annotations

import itertools
import logging
import types
from typing import Any

from docs.max_staleness import foreign
from docs.max_staleness.record import BATCH, Record
from docs.max_staleness.setup import Setup
from docs.max_staleness.simulation import Simulation

LIMIT = 2
THRESHOLD = LIMIT + 1  # versions that a group spans, of which the one that trains is the last
WARMUP = 2  # batches ahead of training
POLL = 0.1  # of its loop, in units of a training step

PROMISES = {
    "drop": "drop the trajectory",
    "wait": "dropless, wait all trajectories that reach threshold to finish",
}


def setups() -> list[Setup]:
    """Both strategies."""
    path = foreign.installed("verl/trainer/ppo/v1/replay_buffer.py")
    return [_setup(path, strategy) for strategy in PROMISES]


def _setup(path: Any, strategy: str) -> Setup:
    async def run(record: Record) -> None:
        record.time = _run(path, strategy, record)

    return Setup(
        framework="verl 0.9.1",
        option=f"max_off_policy_threshold={THRESHOLD}, max_off_policy_strategy={strategy}",
        limit=LIMIT,
        unit="versions spanned",
        measured_at="use" if strategy == "drop" else "use, of what is not yet finished",
        promise=f"Maximum number of model versions that trajectory can span. {PROMISES[strategy]}",
        source="trainer/config/ppo_trainer.yaml:294-303",
        bound="threshold - 1",
        most=LIMIT,
        theirs="ReplayBufferAsync",
        ours="its trainer (one update a step, one mini-batch), TransferQueue as a dictionary",
        run=run,
    )


class Store:
    """What TransferQueue keeps of prompts and trajectories: their tags."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_list(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {"train": self.tags}

    def kv_clear(self, *, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            self.tags.pop(key, None)


class Batch(types.SimpleNamespace):
    """Keys of a selection, in place of TransferQueue's KVBatchMeta."""


def _run(path: Any, strategy: str, record: Record) -> float:
    time, store, numbers = Simulation(record.seed), Store(), itertools.count()
    skip = types.SimpleNamespace(annotate_tq=lambda **options: lambda method: method)
    contents = {
        "transfer_queue": {"kv_list": store.kv_list, "kv_clear": store.kv_clear},
        "verl.utils.skip": {"SkipManager": skip},
    }
    contents["transfer_queue"]["KVBatchMeta"] = Batch  # type: ignore[assignment]
    module = foreign.load(path, ("verl", "transfer_queue", "omegaconf"), contents)
    logging.getLogger(module.__name__).setLevel(logging.ERROR)
    module.time = types.SimpleNamespace(sleep=time.sleep, time=lambda: time.now)

    def submit(count: int) -> None:
        for _ in range(count):
            number = next(numbers)
            step = record.version + 1  # that is worked on
            record.act(number, record.version)
            tag = {"is_prompt": True, "status": "running", "global_steps": step}
            store.tags[str(number)] = tag

            def finish(number: int = number, tag: dict[str, Any] = tag) -> None:
                tag["status"] = "finished"
                store.tags[f"{number}_0_0"] = {}

            time.after(record.duration(), finish)

    buffer = module.ReplayBufferAsync(
        trainer_mode="separate_async",
        trainer_config=None,
        max_off_policy_threshold=THRESHOLD,
        max_off_policy_strategy=strategy,
        sampler_kwargs=None,
        poll_interval=POLL,
        refill_fn=submit,
    )
    submit(WARMUP * BATCH)
    while not record.done:
        submit(BATCH)
        batch, metrics = buffer.sample(record.version + 1, "train", BATCH)
        record.dropped += metrics.get("training/off_policy/evicted_samples", 0)
        record.train([int(key.split("_")[0]) for key in batch.keys])
        time.sleep(record.training())
        record.trained()
    return time.now
