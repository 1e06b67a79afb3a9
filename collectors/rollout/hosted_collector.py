"""A collector inside a worker, instead of a plain rollout.

    trainer's scheme  --->  this worker's receiver  --->  the hosted collector's own schemes
    trainer's block   <---  rows, versions translated  <---  its batches

Messages and weights are handled between two batches. During a batch, a thread reports its progress
to the trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from tensordict import TensorDict

from collectors.data.batch import frames_of
from collectors.rollout.environment import Restored
from collectors.rollout.frame_block import Field, FrameBlock, FrameLayout
from collectors.rollout.seeds import Seeds
from collectors.rollout.spaces import ENDS, RESERVED, Key, as_key
from collectors.weights.policy_version import VersionMap
from collectors.weights.receiver import WeightReceiver
from collectors.workers.shared_counters import (
    FRAMES,
    HANDING_OVER,
    REPLAYING,
    STAGE,
    STEPPING,
    STEPS,
    VERSION,
    SharedCounters,
)

_LOOK_S = 0.5


class HostedCollector:
    """Fills blocks with a collector's batches; has the methods of a `Rollout`."""

    def __init__(
        self,
        collector: Any,
        seeds: Seeds,
        *,
        counters: SharedCounters,
        poll_control: Callable[[], bool],
    ):
        self.collector = collector
        self.counters = counters.values
        self.poll_control = poll_control
        self.frames: FrameBlock | None = None
        self.apply_at, self.may_take = "batch", True  # what it does with them is its own affair
        self.layout: FrameLayout | None = None
        self._first: TensorDict | None = None
        self.stamps = VersionMap()
        self.reseed(seeds)
        threading.Thread(target=self._tell_progress, name="lockstep-progress", daemon=True).start()

    def _tell_progress(self) -> None:
        """Count a step whenever the hosted collector has made frames."""
        made = -1
        while True:
            time.sleep(_LOOK_S)
            before, made = made, self.collector._counters()["collected"]
            if made != before:
                self.counters[STEPS] += 1

    def follow(self, weights: WeightReceiver) -> None:
        """Note which of the trainer's versions the hosted collector's newest one is."""
        self.stamps.note(self.collector.publisher.version, weights.version)
        self.counters[VERSION] = weights.version

    def reseed(self, seeds: Seeds) -> None:
        self.seeds = seeds
        self.collector.set_seed(int(seeds.environments(1)[0]), seeds.static)
        self._first = None

    def restart(self, which: np.ndarray[Any, Any] | None = None) -> None:
        self.collector.reset(which)
        self._first = None

    def attribute(self, name: str) -> list[Any]:
        found: list[Any] = self.collector.getattr_env(name)
        return found

    def plan(self, num_steps: int) -> FrameLayout:
        if self.layout is None:
            self._first = self.collector.next()
            self.layout = _layout(self._first)
        return self.layout

    def collect(self, frames: FrameBlock) -> int:
        """Fill the block with the next batch; how many rows that has."""
        counters = self.counters
        self.poll_control()
        counters[STAGE] = STEPPING
        batch = self.collector.next() if self._first is None else self._first
        self._first = None
        batch["policy_version"] = self.stamps.translate(batch["policy_version"])
        _write(frames, batch)
        counters[FRAMES] += frames_of(batch)
        counters[STEPS] += 1
        counters[STAGE] = HANDING_OVER
        steps: int = batch.batch_size[1]
        return steps

    def state_dict(self) -> dict[str, Any]:
        return {
            "seeds": asdict(self.seeds),
            "collector": self.collector.state_dict(),
            "stamps": self.stamps.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, goes_on: bool = True) -> Restored:
        self.counters[STAGE] = REPLAYING
        exact: bool = self.collector.load_state_dict(state["collector"])
        self.stamps.load_state_dict(state["stamps"])
        self._first = None
        if not goes_on:
            self.collector.reset()
        return Restored(exact and goes_on, [])


def _layout(batch: TensorDict) -> FrameLayout:
    """What a batch of the hosted collector holds, as the layout of a block."""
    num_envs, num_steps = batch.batch_size
    keys = [as_key(key) for key in batch.keys(True, True)]
    root = [key for key in keys if key[0] not in RESERVED]
    follows = [key[1:] for key in keys if key[0] == "next" and key[1] not in ENDS]
    observations = [key for key in root if key in follows]
    outputs = [key for key in root if key not in follows]
    outputs += [("next", *key) for key in follows if key not in observations]

    def field(key: Key, rows: int) -> Field:
        value = batch.get(key)
        return Field(key, rows, tuple(value.shape[2:]), value.dtype)

    return FrameLayout(
        num_envs,
        num_steps,
        tuple(field(key, num_steps) for key in observations),
        tuple(field(key, num_steps) for key in outputs),
        field(("action",), num_steps),
        hosted=True,
    )


def _write(frames: FrameBlock, batch: TensorDict) -> None:
    """Put a batch [environments, time] into a block, time first."""
    frames.begin()
    steps = batch.batch_size[1]
    for name, field in frames.layout.fields.items():
        frames.tensors[name][:steps] = batch.get(field.key).transpose(0, 1)
