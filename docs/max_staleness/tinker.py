"""tinker-cookbook's do_async_training, whole: slots that are freed after a training step."""

from __future__ import annotations

import asyncio
import itertools
import logging
import types
from typing import Any

from docs.max_staleness import foreign
from docs.max_staleness.record import BATCH, Record
from docs.max_staleness.setup import Setup

LIMIT = 2
STUBS = ("tinker", "tinker_cookbook", "chz", "torch", "tqdm")


def setups() -> list[Setup]:
    """One setting."""
    module = foreign.load(foreign.installed("tinker_cookbook/rl/train.py"), STUBS)

    async def run(record: Record) -> None:
        await _run(module, record)

    return [
        Setup(
            framework="tinker-cookbook 0.6.1",
            option=f"max_steps_off_policy={LIMIT}",
            limit=LIMIT,
            unit="updates",
            measured_at="admission, in slots",
            promise=(
                "A slow rollout is trained when it finishes, even if that makes it more than "
                "``max_steps_off_policy`` steps stale."
            ),
            source="rl/train.py:426-431",
            bound="none",
            most=None,
            theirs="do_async_training, with its four loops",
            ours="rollouts and training steps, which only take time",
            run=run,
        )
    ]


async def _run(module: Any, record: Record) -> None:
    numbers = itertools.count()
    logging.getLogger(module.__name__).setLevel(logging.ERROR)

    async def nothing(*args: Any, **options: Any) -> Any:
        return {"sampler_path": "", "state_path": ""}

    async def rollout(client: Any, builder: Any, **options: Any) -> Any:
        sample = next(numbers)
        record.act(sample, record.version)
        await asyncio.sleep(record.duration())
        return types.SimpleNamespace(sample=sample)

    async def train(config: Any, i_batch: int, *args: Any, **options: Any) -> Any:
        groups = args[5]
        record.train([group.sample for group in groups])
        await asyncio.sleep(record.training())
        record.trained()
        return object(), {}

    window = types.SimpleNamespace(get_timing_metrics=dict, save_timing=lambda *a, **k: None)
    span = _Context(window)
    module.trace = types.SimpleNamespace(
        scope=lambda f: f, scope_span=lambda *a: span, trace_iteration=lambda **k: span
    )
    module.checkpoint_utils = types.SimpleNamespace(save_checkpoint_async=nothing)
    module.do_group_rollout_and_filter_constant_reward = rollout
    module.do_train_step_and_get_sampling_client = train
    module.drop_constant_reward_group = lambda group, *a: group
    module._maybe_export_rollout_summary_jsonl = lambda **k: None
    module.compute_sampling_client_metrics = lambda groups: {}
    module.iteration_dir = lambda *a: None
    module.WrappedTrajectoryGroup = types.SimpleNamespace  # a chz class of the same fields
    settings = types.SimpleNamespace(groups_per_batch=BATCH, max_steps_off_policy=LIMIT)
    config = _Config(async_config=settings, stream_minibatch_config=None)
    client = types.SimpleNamespace(
        create_sampling_client=lambda *a, **k: types.SimpleNamespace(result=object)
    )
    builders = [types.SimpleNamespace(logging_tags=list)] * BATCH
    dataset = types.SimpleNamespace(get_batch=lambda i: builders)
    log = types.SimpleNamespace(
        enable_event_steps=lambda: None, log_metrics=lambda *a, **k: None, store=None
    )
    steps = record.updates
    await module.do_async_training(0, steps, steps, config, client, None, [], dataset, log, None)


class _Context:
    """Something to enter, with `async` or without."""

    def __init__(self, value: Any):
        self._value = value

    def __enter__(self) -> Any:
        return self._value

    def __exit__(self, *error: object) -> None: ...

    async def __aenter__(self) -> Any:
        return self._value

    async def __aexit__(self, *error: object) -> None: ...


class _Config(types.SimpleNamespace):
    """What is not named is zero, and a method returns nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in ("records_stability_info", "effective_termination"):
            return lambda: None
        return 0
