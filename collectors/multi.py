"""The collectors of several worker processes: all together (sync), or each on its own (async)."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from collectors.base import BaseCollector, as_mask
from collectors.data.batch import BatchBuffer, Part, assemble, buffer_for
from collectors.options import ASYNC, SYNC, per_worker, share_frames
from collectors.rollout.seeds import Seeds, check_seed, next_seed
from collectors.signatures import MultiArguments, function_takes
from collectors.weights.publisher import Publisher
from collectors.workers import interrupts
from collectors.workers.handle import Full, WorkerHandle
from collectors.workers.pool import WorkerPool
from collectors.workers.process import PASSED_ON, Job
from collectors.workers.shared_counters import CUT
from collectors.workers.startup import context
from sync.errors import WorkerDied, WorkerError, WorkerTimeout

_NOTICE_S = 0.5  # in which the crew hears of what a scheme has found


class _Workers(BaseCollector):
    """What both kinds share: the crew, and what becomes of its failures."""

    shares_batch = True  # whether frames_per_batch is all workers' together
    pool: WorkerPool | None = None

    def _make_publisher(self) -> Publisher:
        options, n = self.options, self.num_workers
        self._frames_of = share_frames(options.frames_per_batch, n, each=not self.shares_batch)
        self._factories = per_worker(options.policy_factory, n, "policy_factory")
        per_worker(options.create_env_kwargs, n, "create_env_kwargs")
        options.devices(n)
        source = self._source()
        self._ctx = context(options.start_method)  # starts the fork server: after all checks
        return Publisher(
            source,
            options.weight_sync_schemes,
            devices=options.devices(self.num_workers),
            updater=options.weight_updater,
            ctx=self._ctx,
        )

    def _open(self) -> None:
        options = self.options
        self._serial = 0
        self._recovering = threading.RLock()
        self.preempted = 0
        self.pool = WorkerPool(
            self._jobs(),
            self.publisher,
            ctx=self._ctx,
            timeout=options.timeout,
            start_timeout=options.start_timeout,
            resume_timeout=options.resume_timeout,
        )
        self.pool.start()
        self._first_env = np.concatenate([[0], np.cumsum([m.num_envs for m in self.pool.members])])
        if options.weight_updater is not None:
            options.weight_updater.register_collector(self)
        self._begin()

    def _begin(self) -> None:
        """Give the workers their first orders."""

    def _jobs(self) -> list[Job]:
        options, n = self.options, self.num_workers
        factories = per_worker(self.create_env_fn, n, "create_env_fn")
        kwargs = per_worker(options.create_env_kwargs, n, "create_env_kwargs")
        devices = options.devices(n)
        shared = {name: getattr(options, name) for name in (*PASSED_ON, "start_timeout")}
        return [
            Job(
                create_env_fn=factories[i],
                create_env_kwargs=dict(kwargs[i] or {}),
                policy=None if self._factories[i] is not None else self.policy,
                policy_factory=self._factories[i],
                seeds=Seeds(self.seed, i),
                frames=self._frames_of[i],
                collector_class=options.collector_class,
                num_blocks=self._num_blocks,
                policy_device=devices[i],
                num_threads=options.num_sub_threads,
                options={**shared, "random_frames": math.ceil(options.init_random_frames / n)},
            )
            for i in range(n)
        ]

    @property
    def _num_blocks(self) -> int:
        return 1

    @property
    def num_envs(self) -> int:
        """The environments of all workers."""
        return int(self._first_env[-1])

    @property
    def frames_per_batch(self) -> int:
        return sum(self._frames_of) if self.shares_batch else max(self._frames_of)

    # -- failures

    def _see_to_failures(self) -> None:
        """Replace failed workers if that is wanted, and give them orders; else raise."""
        assert self.pool is not None
        if self.options.on_worker_failure == "raise":
            self.pool.raise_failures()
        with self._recovering:
            while failed := self.pool.failed():
                member = failed[0]
                used = sum(one.restarts for one in self.pool.members)
                if used >= self.options.max_restarts:
                    assert member.failure is not None
                    if not getattr(member.failure, "__notes__", None):
                        note = f"max_restarts={self.options.max_restarts} are used up"
                        member.failure.add_note(note)
                    raise member.failure
                self._replace(member)

    def _replace(self, member: WorkerHandle) -> None:
        """Replace a failed worker, and give it orders; one that is not done with stays failed."""
        assert self.pool is not None
        failure = member.failure
        try:
            self.pool.replace(member)
            if member.failure is None:
                self._order_again(member)
        except BaseException:  # an interrupt
            member.failure = member.failure or failure
            raise

    def _publish(self, by_model: Mapping[str, Any], worker_ids: Any) -> None:
        assert self.pool is not None
        # Held still in mid-batch, a worker takes them when its batch is done: not to be waited for.
        wait = False if self.pool.held and self.options.apply_at == "batch" else None
        try:
            self.publisher.publish(by_model, worker_ids, wait=wait)
        except WorkerError as error:
            self._recover(error)

    def _recover(self, error: WorkerError) -> None:
        """Replace whom a scheme found to have failed; raise if that is nobody's failure here."""
        assert self.pool is not None
        pool, publisher = self.pool, self.publisher
        all_died = all(isinstance(one, WorkerDied) for one in error.failures.values())

        def replaced() -> bool:
            return all_died and publisher.is_in_use(error.failures)

        with self._recovering:  # another thread may be replacing them
            pool.wait(lambda: bool(pool.failed() or replaced()), _NOTICE_S)
            if pool.failed():
                self._see_to_failures()
            elif not replaced():
                raise error

    def _order_again(self, member: WorkerHandle) -> None:
        """Give a replacement the orders that its predecessor left undone."""

    # -- taking blocks

    def _part(self, member: WorkerHandle, full: Full) -> Part:
        full.frames.num_steps = full.steps
        if full.generation != member.numbered:
            member.trajectories.restart()
            member.numbered = full.generation
        first = int(self._first_env[member.worker])
        return Part(full.frames, full.steps, member.worker, first, member.trajectories)

    def _counters(self) -> dict[str, Any]:
        assert self.pool is not None
        workers = [self.pool.frame_counts(member) for member in self.pool.members]
        totals = {
            name: sum(worker[name] for worker in workers)
            for name in ("collected", "delivered", "dropped", "in_flight", "restarts")
        }
        return {**totals, "preempted": self.preempted, "workers": workers}

    # -- control

    def _call(
        self,
        method: str,
        *args: Any,
        members: Sequence[WorkerHandle] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        assert self.pool is not None
        self._raise_error()
        while True:
            generations = [member.generation for member in self.pool.members]
            try:
                return self.pool.call(method, *args, members=members, timeout=timeout)
            except WorkerError as error:
                if self.options.on_worker_failure == "restart" and isinstance(error, WorkerTimeout):
                    self.pool.give_up(error, generations)
                if not self.pool.failed():
                    raise
                self._see_to_failures()  # and if all are alive again, ask again

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed every worker's environments and policy, and start new episodes."""
        self.seed = check_seed(seed)
        assert self.pool is not None
        for member, job in zip(self.pool.members, self.pool.jobs, strict=True):
            member.seed = self.seed
            job.seeds = Seeds(self.seed, member.worker, member.restarts, static_seed)
        self._call("set_seed", lambda member: (self.pool.jobs[member.worker].seeds,))
        return next_seed(self.seed)

    def _worker_states(self) -> list[dict[str, Any]]:
        return self._call("state_dict")

    def _load_worker_states(self, states: list[dict[str, Any]], base: int) -> list[bool]:
        assert self.pool is not None
        # On their own, workers are ahead of what was delivered: what lay between is gone, and so is
        # what they made here before.
        goes_on = self.shares_batch
        found = self._call(
            "load_state_dict",
            lambda member: (states[member.worker], base, goes_on),
            timeout=self.options.timeout + self.options.resume_timeout,
        )
        for member, state, (same, last) in zip(self.pool.members, states, found, strict=True):
            member.outdated = last
            member.trajectories.load_state_dict(state["trajectories"], under_way=same)
            job = self.pool.jobs[member.worker]
            job.seeds = Seeds(**state["seeds"])
            member.seed = job.seeds.seed
            job.options["random_frames"] = member.made + state.get("random_frames", 0)
        return [same for same, _ in found]

    def _trajectory_states(self) -> list[dict[str, Any]]:
        assert self.pool is not None
        return [member.trajectories.state_dict() for member in self.pool.members]

    def reset(self, reset_idx: Any = None) -> None:
        """Start new episodes in all environments, or in some, counted over all workers."""
        assert self.pool is not None
        if reset_idx is None:
            self._call("reset", None)
            return
        which = as_mask(reset_idx, self.num_envs)
        first = self._first_env
        for member in self.pool.members:
            mine = np.flatnonzero(which[first[member.worker] : first[member.worker + 1]])
            if len(mine):
                self._call("reset", [int(i) for i in mine], members=[member])

    def _hold(self, still: bool) -> None:
        assert self.pool is not None
        self.pool.hold(still)
        if still:
            self._call("stats")  # whoever answers has read the message before it

    def _close(self, timeout: float, close_env: bool) -> None:
        if self.pool is not None:
            self.pool.close(timeout, close_env=close_env)


class MultiSyncCollector(_Workers):
    """All workers make one batch together: the next is begun when it is asked for.

    Its frames are made with weights no older than those published before that.
    """

    kind = SYNC

    def _begin(self) -> None:
        self._under_way = False
        self._room: BatchBuffer | None = None  # with copy=False, for all batches
        assert self.pool is not None
        how, counts = self.options.cat_results, [m.num_envs for m in self.pool.members]
        if how not in (None, 0) and len(set(counts)) > 1:
            raise ValueError(
                f"cat_results={how!r} needs workers with as many environments each, not {counts}"
            )

    def _gather(self) -> TensorDict:
        assert self.pool is not None
        pool, members = self.pool, self.pool.members
        if not self._under_way:  # else an interrupt cut short the call before this one
            self._serial += 1
            self._under_way = True
        enough = len(members)
        if self.options.preemptive_threshold is not None:
            enough = math.ceil(self.options.preemptive_threshold * len(members))
        with interrupts.let_in():
            self._wait_for(enough)
            if enough < len(members):
                for member in members:
                    if not self._has_filled(member):
                        member.counters.values[CUT] = self._serial
                self._wait_for(len(members))
        self._under_way = False
        pool.arrived.clear()
        parts = [self._part(member, pool.take(member)) for member in members]
        self._check_alike(parts)
        steps = max(part.frames.layout.num_steps for part in parts)
        stamps = self.tracked is not None
        if self._room is None and not self.options.copy:
            self._room = buffer_for(parts, steps, stamps)
        batch = assemble(parts, num_steps=steps, copy=True, stamps=stamps, room=self._room)
        self.preempted += sum(
            (part.frames.layout.num_steps - part.steps) * part.frames.layout.num_envs
            for member, part in zip(members, parts, strict=True)
            if member.counters.values[CUT] == self._serial
        )
        return self._combined(batch, [part.frames.layout.num_envs for part in parts])

    def _has_filled(self, member: WorkerHandle) -> bool:
        return bool(member.full) and member.full[-1].serial == self._serial

    def _wait_for(self, enough: int) -> None:
        """Wait until so many workers have filled their blocks, replacing those that fail."""
        assert self.pool is not None
        pool = self.pool

        def enough_are_full() -> bool:
            return sum(self._has_filled(member) for member in pool.members) >= enough

        def free() -> list[WorkerHandle]:  # new, and not told anything yet
            return [m for m in pool.members if not m.ordered and not self._has_filled(m)]

        while not enough_are_full() or pool.failed():
            self._see_to_failures()
            for member in free():
                pool.order(member, 0, self._serial)
            pool.wait(lambda: bool(enough_are_full() or pool.failed() or free()), None)
            self._raise_error()

    def _check_alike(self, parts: Sequence[Part]) -> None:
        first = parts[0].frames.layout
        for part in parts[1:]:
            mine = part.frames.layout
            for name, field in first.fields.items():
                other = mine.fields.get(name)
                if other is None or (field.key, field.shape, field.dtype) != (
                    other.key,
                    other.shape,
                    other.dtype,
                ):
                    raise ValueError(
                        f"worker 0 and worker {part.worker} differ in {'/'.join(field.key)!r}: one "
                        "batch cannot hold both (MultiAsyncCollector hands them over apart)"
                    )

    def _combined(self, batch: TensorDict, counts: list[int]) -> TensorDict:
        how = self.options.cat_results
        if how is None or how == 0:
            return batch
        by_worker = batch.reshape(len(counts), counts[0], batch.batch_size[1])
        if how == "stack":
            return by_worker
        joined: TensorDict = torch.cat(list(by_worker.unbind(0)), how)  # type: ignore[assignment]
        return joined


class MultiAsyncCollector(_Workers):
    """Workers fill blocks on their own; batches come one worker's at a time, the first full first.

    A worker runs ahead of the learner by its own free blocks, then waits: nothing is dropped.
    """

    kind = ASYNC
    shares_batch = False

    @property
    def _num_blocks(self) -> int:
        return 2 if self.options.copy else 3

    def _begin(self) -> None:
        assert self.pool is not None
        self._lent: tuple[WorkerHandle, Full] | None = None
        for member in self.pool.members:
            self._order_again(member)

    def _order_again(self, member: WorkerHandle) -> None:
        assert self.pool is not None
        for block in range(self._num_blocks):
            self._order(member, block)

    def _order(self, member: WorkerHandle, block: int) -> None:
        assert self.pool is not None
        self._serial += 1
        self.pool.order(member, block, self._serial)

    def _gather(self) -> TensorDict:
        if self._lent is not None:
            self._give_back(*self._lent)
            self._lent = None
        member, full = self._first_full()
        while full.serial <= member.outdated:
            self._give_back(member, full)
            member, full = self._first_full()
        self._lent = (member, full)
        part = self._part(member, full)
        steps = part.frames.layout.num_steps
        batch = assemble(
            [part], num_steps=steps, copy=self.options.copy, stamps=self.tracked is not None
        )
        if self.options.copy:
            self._lent = None
            self._give_back(member, full)
        return batch

    def _first_full(self) -> tuple[WorkerHandle, Full]:
        """The block that was full first, waiting for one."""
        assert self.pool is not None
        pool = self.pool
        with interrupts.let_in():
            pool.look()  # others may deliver so fast that nobody ever waits
            self._see_to_failures()
            while not pool.arrived:
                pool.wait(lambda: bool(pool.arrived or pool.failed()), None)
                self._raise_error()
                self._see_to_failures()
        return pool.take_first()

    def _give_back(self, member: WorkerHandle, full: Full) -> None:
        """Have the block filled again, unless its worker is no more."""
        if full.generation == member.generation:
            self._order(member, full.block)


@function_takes(MultiArguments)
def MultiCollector(
    create_env_fn: Any, policy: Any = None, *, sync: bool, **options: Any
) -> MultiSyncCollector | MultiAsyncCollector:
    """A `MultiSyncCollector` or a `MultiAsyncCollector`, as `sync` says."""
    if not isinstance(sync, bool):
        raise TypeError(f"sync={sync!r}: it must be True or False")
    kind = MultiSyncCollector if sync else MultiAsyncCollector
    return kind(create_env_fn, policy, **options)
