"""The base of collectors with several workers, local or remote: orders, recovery, control."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensordict import TensorDict

from collectors.base import BaseCollector, as_mask, ends_on_interrupt
from collectors.data.batch import Filled
from collectors.rollout.environment import Restored
from collectors.rollout.seeds import Seeds
from collectors.rollout.spaces import name_of
from collectors.schedule.recorder import Recorder
from collectors.workers.handle import FRAME_COUNTS, WorkerHandle
from collectors.workers.pool import WorkerPool
from collectors.workers.turns import FirstFinished, Together
from sync.errors import WorkerDied, WorkerError, WorkerTimeout, combine


class PooledCollector(BaseCollector):
    """Workers make batches together (`shares_batch`), or each on its own.

    next()
      turns.next()          orders batches, and waits for those whose turn it is
      pool.take(worker)     counted as delivered
      _assemble(...)        one batch of all, or of one
      pool.release(filled)  its memory can be written again
    """

    shares_batch = True
    preempted = 0  # frames that stopped workers did not make
    _frames_of: Sequence[int]  # of each worker in a batch

    @abstractmethod
    def _make_handles(self) -> list[WorkerHandle]:
        """What the pool starts."""

    def _open(self) -> None:
        self._recovering = threading.RLock()  # one thread at a time replaces workers
        self.pool = WorkerPool(
            self.publisher,
            timeout=self.options.timeout,
            start_timeout=self.options.start_timeout,
        )
        self._check_equal_frames()
        self.pool.start(self._make_handles())
        self._recorder = self._make_recorder()
        self.turns = self._make_turns()

    def _make_turns(self) -> Together | FirstFinished:
        options = self.options
        if self.shares_batch:
            return Together(self.pool, self._attend, options.preemptive_threshold)
        return FirstFinished(self.pool, self._attend, options.batches_ahead, options.max_lag)

    def _attend(self) -> None:
        """Replace workers that have failed, or raise; raise if the collector has ended."""
        self._raise_error()
        self._see_to_failures()

    def _check_equal_frames(self) -> None:
        if self.options.record_schedule is not None and len(set(self._frames_of)) > 1:
            raise ValueError(
                f"frames_per_batch={list(self._frames_of)}: workers are not equal, so there is no "
                "replay of them; leave record_schedule out, or give one number"
            )

    def _close(self, timeout: float, close_env: bool) -> None:
        if hasattr(self, "pool"):
            self.pool.close(timeout, close_env=close_env)

    @property
    def handles(self) -> list[WorkerHandle]:
        """The workers, in their order."""
        return self.pool.handles

    @property
    def num_envs(self) -> int:
        """The environments of all workers."""
        return sum(handle.num_envs for handle in self.handles)

    @property
    def frames_per_batch(self) -> int:
        frames = [handle.spec.frames for handle in self.handles] or self._frames_of
        return sum(frames) if self.shares_batch else max(frames)

    # -- batches

    def _gather(self) -> TensorDict:
        handles = self.turns.next()
        if self._recorder is not None:
            self._record(self._recorder, handles)
        batch = self._take(handles)
        self.turns.taken()
        return batch

    def _record(self, recorder: Recorder, handles: Sequence[WorkerHandle]) -> None:
        for handle in handles:
            filled = handle.finished[0]
            stamps = handle.stamps_of_finished(filled)
            recorder.note(handle.index, filled.generation, stamps, filled.made_s)

    def _make_recorder(self) -> Recorder | None:
        """Where the schedule is recorded, if it is."""
        if self.options.record_schedule is None:
            return None
        first, counts = self.handles[0], [handle.num_envs for handle in self.handles]
        if len(set(counts)) > 1:
            raise ValueError(
                f"record_schedule: workers have {counts} environments; there is only a replay of "
                "workers with equal numbers"
            )
        return Recorder(
            self.options.record_schedule,
            num_workers=self.num_workers,
            num_steps=first.spec.frames // first.num_envs,
            num_envs=first.num_envs,
            seed=self.seed,
        )

    def _check_not_recording(self, call: str) -> None:
        """Refuse a call that changes what workers do, and that a recording does not have."""
        if self._recorder is not None:
            raise RuntimeError(
                f"{call}(): a recording of a schedule has no such call, so its replay would "
                f"differ: leave record_schedule={self.options.record_schedule!r} out"
            )

    def _take(self, handles: Sequence[WorkerHandle]) -> TensorDict:
        """One batch of the oldest finished one of each of these workers."""
        taken = [self.pool.take(handle) for handle in handles]
        try:
            return self._assemble(taken)
        except BaseException:
            for filled in taken:
                self.pool.discard(filled)
            raise
        finally:
            for filled in taken:
                self.pool.release(filled)

    def _assemble(self, taken: Sequence[Filled]) -> TensorDict:
        """One batch of these, copied."""
        return self._batch_of(taken)

    # -- watching

    def worker_stages(self) -> list[str]:
        return [str(h.reported_counts().get("stage", "")) for h in self.handles]

    def made_batches(self) -> list[Filled]:
        made = self.pool.made
        return [made.popleft() for _ in range(len(made))]

    # -- failures

    def _see_to_failures(self) -> None:
        """Replace failed workers if `on_worker_failure` says so; else raise their failures."""
        pool = self.pool
        with self._recovering:
            while failed := pool.failed():
                if self.options.on_worker_failure == "raise":
                    self._record_failure(failed[0])
                    pool.raise_failures()
                failure = failed[0].failure
                assert failure is not None
                restarts = sum(handle.frame_counts()["restarts"] for handle in pool.handles)
                if restarts >= self.options.max_restarts:
                    self._record_failure(failed[0])
                    if not getattr(failure, "__notes__", None):
                        failure.add_note(
                            f"all max_restarts={self.options.max_restarts} are used up"
                        )
                    raise failure
                pool.replace(failed[0])

    def _record_failure(self, handle: WorkerHandle) -> None:
        """Record what the worker was doing, so that a replay fails in the same way."""
        if self.shares_batch or self._recorder is None:
            return
        for lost in handle.finished:
            stamps = handle.stamps_of_finished(lost)
            self._recorder.note_lost(handle.index, lost.generation, stamps)
        so_far = handle.stamps_so_far(min(handle.ordered)) if handle.ordered else None
        if so_far is not None:
            self._recorder.note_lost(handle.index, handle.generation, so_far)
        self._recorder = None

    def _recover(
        self, error: WorkerError, generations: Mapping[int, int], *lost: type[WorkerError]
    ) -> None:
        """Replace the workers that failed in these generations; raise other failures.

        lost: the kinds of errors after which a worker counts as failed.
        """
        pool = self.pool
        pool.wait(lambda: bool(pool.failed()), 0.2)  # prefer the worker's own error
        with self._recovering:
            others = pool.note(error, generations, lost)
            self._see_to_failures()
        if others:
            raise combine(others)

    def _publish(self, by_model: Mapping[str, Any], worker_ids: Any) -> None:
        generations = self.pool.generations()
        # An episode may last long, or until the next batch is ordered. A worker that is paused
        # during a batch applies weights after it. Do not wait for either.
        at = self.options.apply_at
        wait = False if at == "episode" or (at == "batch" and self.pool.held) else None
        try:
            self.publisher.publish(by_model, worker_ids, wait=wait)
        except WorkerError as error:  # a replacement gets the newest weights when it starts
            self._recover(error, generations, WorkerDied)

    # -- control

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker between two steps; the results, in worker order."""
        return self._ask(method, lambda handle: args)

    def _ask(
        self,
        method: str,
        arguments: Callable[[WorkerHandle], tuple[Any, ...]],
        chosen: Sequence[WorkerHandle] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a method of workers. Workers that fail are replaced and called again."""
        self._raise_error()
        restarts = self.options.on_worker_failure == "restart"
        lost = (WorkerDied, WorkerTimeout) if restarts else ()
        while True:
            generations = self.pool.generations()
            try:
                return self.pool.call(method, arguments, chosen, timeout)
            except WorkerError as error:
                if self.pool.closed:
                    raise
                self._recover(error, generations, *lost)

    def _reseed(self) -> None:
        self._check_not_recording("set_seed")
        for handle in self.handles:
            seeds, base = handle.spec.seeds, self.seeds
            handle.spec.seeds = replace(seeds, seed=base.seed, static=base.static)
        self._ask("set_seed", lambda handle: (handle.spec.seeds,))

    def _attributes(self, name: str) -> list[Any]:
        return self._call("getattr_env", name)

    @ends_on_interrupt
    def reset(self, reset_idx: Any = None) -> None:
        """Start new episodes in all environments, or in some, counted over all workers."""
        self._check_not_recording("reset")
        if reset_idx is None:
            self._call("reset", None)
            return
        which = as_mask(reset_idx, max(h.first_env + h.num_envs for h in self.handles))
        of = {h: which[h.first_env : h.first_env + h.num_envs] for h in self.handles}
        self._ask("reset", lambda handle: (of[handle],), [h for h in of if of[h].any()])

    @ends_on_interrupt
    def _hold(self, still: bool) -> None:
        self.pool.hold(True)
        try:
            self._call("hold", still)
        finally:
            self.pool.hold(still)

    # -- saving

    def _worker_states(self) -> list[dict[str, Any]]:
        states = self._call("state_dict")
        for handle, state in zip(self.handles, states, strict=True):
            state["trajectories"] = handle.trajectories.state_dict()
        return states

    def _load_worker_states(self, states: list[dict[str, Any]], base: int) -> list[Restored]:
        # Asynchronous workers were ahead of what was delivered. Those frames are gone, and so are
        # the frames that they collected here before.
        if self._recorder is not None:
            self._recorder.note_resumed()
        of = dict(zip(self.handles, states, strict=True))
        timeout, held = self.options.timeout + self.options.resume_timeout, self.pool.held
        self.pool.hold(True)  # no frames are expected of a worker that replays episodes
        try:
            found = self._ask(
                "load_state_dict",
                lambda handle: (of[handle], base, self.shares_batch),
                timeout=timeout,
            )
        finally:
            self.pool.hold(held)
        for (handle, state), (restored, first) in zip(of.items(), found, strict=True):
            self.pool.drop_before(handle, first)
            handle.trajectories.load_state_dict(state["trajectories"], under_way=restored.under_way)
            handle.numbered = handle.generation
            spec = handle.spec
            spec.seeds = Seeds(**state["seeds"])
            spec.options["random_frames"] = handle.collected + state.get("random_frames", 0)
        return [restored for restored, _ in found]

    def _counters(self) -> dict[str, Any]:
        workers = self.pool.frame_counts()
        totals = {name: sum(worker[name] for worker in workers) for name in FRAME_COUNTS}
        totals["preempted"] += self.preempted
        return {**totals, "workers": workers}


def check_alike(
    handles: Sequence[WorkerHandle], entries: Sequence[Mapping[Any, Any]], otherwise: str
) -> None:
    """Refuse frames of different entries, each a shape and a dtype: one batch cannot hold both."""
    first = entries[0]
    for handle, other in zip(handles, entries, strict=True):
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                raise ValueError(
                    f"{handle.name} {handles[0].index} and {handle.name} {handle.index} differ in "
                    f"{name_of(key)!r}: one batch cannot hold both ({otherwise} returns them "
                    "separately)"
                )
