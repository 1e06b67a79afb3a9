"""Collectors with worker processes: all together (sync), or each at its own pace (async)."""

from __future__ import annotations

import sync as _  # noqa: F401 - before tensordict  # isort: skip
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from collectors.base import BaseCollector
from collectors.data.batch import TrajectoryNumbers, WorkerBatch
from collectors.options.collector_options import (
    ASYNC,
    SYNC,
    MultiArguments,
    function_takes,
    per_worker,
    share_frames,
)
from collectors.weights.publisher import Publisher
from collectors.workers.handle import WorkerHandle
from collectors.workers.pool import WorkerPool
from collectors.workers.process_handle import ProcessHandle
from collectors.workers.process_lifetime import context
from collectors.workers.worker_spec import WorkerSpec, worker_specs


class _LocalCollector(BaseCollector):
    """Workers are processes of this machine, which collect into shared memory."""

    def _make_publisher(self) -> Publisher:
        options = self.options
        self._specs = self._make_specs()  # which checks options before anything is started
        source = self._source()
        self._ctx = context(options.start_method)
        return Publisher(
            source,
            options.weight_sync_schemes,
            devices=[spec.policy_device for spec in self._specs],
            timeout=self.options.timeout,
            updater=options.weight_updater,
            ctx=self._ctx,
        )

    def _make_specs(self) -> list[WorkerSpec]:
        options, n = self.options, self.num_workers
        self._frames_of = share_frames(options.frames_per_batch, n, each=not self.shares_batch)
        specs = worker_specs(
            options,
            self.seeds,
            factories=per_worker(self.create_env_fn, n, "create_env_fn"),
            env_kwargs=per_worker(options.create_env_kwargs, n, "create_env_kwargs"),
            frames=self._frames_of,
            num_blocks=1 if self.shares_batch else options.batches_ahead,
            devices=options.devices(n),
        )
        policies = per_worker(options.policy_factory, n, "policy_factory")
        for spec, factory in zip(specs, policies, strict=True):
            spec.policy_factory = factory
            spec.policy = None if factory is not None else self.policy
        return specs

    def _make_handles(self) -> list[WorkerHandle]:
        return [self._handle(index, spec) for index, spec in enumerate(self._specs)]

    def _handle(self, index: int, spec: WorkerSpec) -> WorkerHandle:
        return ProcessHandle(
            index,
            spec,
            TrajectoryNumbers(index, self.num_workers),
            self.publisher,
            ctx=self._ctx,
            timeout=self.options.timeout,
            resume_timeout=self.options.resume_timeout,
        )


class MultiSyncCollector(_LocalCollector):
    """All workers make one batch together, which starts when it is requested.

    Its weights are no older than the last version published before the request.
    """

    kind = SYNC
    pool: WorkerPool

    def _open(self) -> None:
        super()._open()
        how, counts = self.options.cat_results, [handle.num_envs for handle in self.pool.handles]
        if how not in (None, 0) and len(set(counts)) > 1:
            raise ValueError(
                f"cat_results={how!r} needs the same number of environments in each worker, "
                f"not {counts}"
            )

    def _assemble(self, taken: Sequence[WorkerBatch]) -> TensorDict:
        batch = super()._assemble(taken)
        layouts = [part.frames.layout for part in taken]
        for part, layout in zip(taken, layouts, strict=True):
            if part.serial == self.pool.handles[part.worker].cut_serial:
                self.pool.preempted += (layout.num_steps - part.steps) * layout.num_envs
        return self._combined(batch, [layout.num_envs for layout in layouts])

    def _combined(self, batch: TensorDict, counts: list[int]) -> TensorDict:
        how = self.options.cat_results
        if how is None or how == 0:
            return batch
        by_worker = batch.reshape(len(counts), counts[0], batch.batch_size[1])
        if how == "stack":
            return by_worker
        joined: TensorDict = torch.cat(list(by_worker.unbind(0)), how)  # type: ignore[assignment]
        return joined


class MultiAsyncCollector(_LocalCollector):
    """Workers collect at their own pace; each batch is from one worker, first finished first.

    A worker runs ahead of the learner by `batches_ahead` batches, then waits. Nothing is dropped.
    """

    kind = ASYNC
    shares_batch = False


@function_takes(MultiArguments)
def MultiCollector(
    create_env_fn: Any, policy: Any = None, *, sync: bool, **options: Any
) -> MultiSyncCollector | MultiAsyncCollector:
    """A `MultiSyncCollector` or a `MultiAsyncCollector`, as `sync` says."""
    if not isinstance(sync, bool):
        raise TypeError(f"sync={sync!r}: it must be True or False")
    kind = MultiSyncCollector if sync else MultiAsyncCollector
    return kind(create_env_fn, policy, **options)
