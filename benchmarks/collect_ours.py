"""Lockstep's collectors, as a contestant of the collection benchmark.

Weights are published once a batch where there are workers to publish to, as a learner would.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from benchmarks.collect_case import WORKERS, Case, build_policy, make_env, step_weights
from benchmarks.collect_session import Session, serve, take_batches
from benchmarks.host import LeftOut
from collectors import (
    BaseCollector,
    Collector,
    DistributedCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
    SimulatedCollector,
    Simulator,
)
from sync import SharedMemWeightSyncScheme


class Lockstep(Session):
    """A collector with its default settings, but for `options`."""

    def __init__(self, case: Case, options: dict[str, Any]):
        self.policy, self.published = build_policy(case.env), 0
        make = functools.partial(make_env, case.env, case.num_envs)
        begun = time.perf_counter()
        self.workers = 0 if case.mode == "single" else WORKERS
        self.collector = self._collector(case, make, options)
        self.batches = iter(self.collector)
        first = next(self.batches)
        self.first_batch_s = time.perf_counter() - begun
        assert first.numel() >= case.batch_frames, (first.shape, case.batch_frames)
        assert "action_log_prob" in first.keys()  # noqa: SIM118  (a TensorDict iterates its rows)

    def _collector(self, case: Case, make: Any, options: dict[str, Any]) -> BaseCollector:
        common = {"frames_per_batch": case.batch_frames, "total_frames": -1, **options}
        if case.mode == "single":
            return Collector(make, self.policy, **common)
        if case.mode == "simulated":
            schedule = Simulator(num_workers=WORKERS, num_steps=case.steps)
            return SimulatedCollector(
                make, self.policy, num_workers=WORKERS, schedule=schedule, **common
            )
        if case.mode == "distributed":
            if not common.get("copy", True):
                raise LeftOut("batches of nodes have memory of their own")
            return DistributedCollector(make, self.policy, num_collectors=WORKERS, **common)
        waits = case.mode == "multi_sync"
        kind = MultiSyncCollector if waits else MultiAsyncCollector
        schemes = {"policy": SharedMemWeightSyncScheme(sync=waits)}
        return kind([make] * WORKERS, self.policy, weight_sync_schemes=schemes, **common)

    def next_batch(self) -> int:
        """The frames of one more batch, which goes with an update of the workers' weights."""
        if self.workers:
            self.published += 1
            step_weights(self.policy, self.published)
            self.collector.update_policy_weights_()
        return int(next(self.batches)["collector", "mask"].sum())

    def turn(self, seconds: float) -> tuple[int, float]:
        return take_batches(self.next_batch, seconds, ahead=2 * self.workers + 1)

    def close(self) -> None:
        self.collector.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Lockstep)
