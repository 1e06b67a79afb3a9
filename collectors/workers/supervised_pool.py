"""A pool whose workers are called, and replaced when they fail, as a collector's options say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from collectors.data.batch import Filled
from collectors.options import Options
from collectors.rollout.environment import Restored
from collectors.rollout.frame_block import FrameLayout
from collectors.rollout.seeds import Seeds
from collectors.rollout.spaces import name_of
from collectors.schedule.recording import Recorder
from collectors.weights.publisher import Publisher
from collectors.workers.handle import FRAME_COUNTS, WorkerHandle
from collectors.workers.pool import WorkerPool
from sync.errors import WorkerDied, WorkerError, WorkerTimeout, combine


class SupervisedPool(WorkerPool):
    """The workers of a collector.

    check_open: raises if the collector has ended.
    shares_batch: whether workers make batches together.
    """

    def __init__(
        self,
        publisher: Publisher,
        options: Options,
        *,
        check_open: Callable[[], None],
        shares_batch: bool,
    ):
        super().__init__(publisher, timeout=options.timeout, start_timeout=options.start_timeout)
        self._options = options
        self._check_open = check_open
        self._shares_batch = shares_batch
        self._recovering = threading.RLock()  # one thread at a time replaces workers
        self._recorder: Recorder | None = None
        self.preempted = 0  # frames that stopped workers did not make

    @property
    def num_envs(self) -> int:
        """The environments of all workers."""
        return sum(handle.num_envs for handle in self.handles)

    # -- batches

    def record(self, path: str, seed: int) -> None:
        """Record the schedule: which batches are taken, in which order, with which versions."""
        first, counts = self.handles[0], [handle.num_envs for handle in self.handles]
        if len(set(counts)) > 1:
            raise ValueError(
                f"record_schedule: workers have {counts} environments; there is only a replay of "
                "workers with equal numbers"
            )
        self._recorder = Recorder(
            path,
            num_workers=len(counts),
            num_steps=first.spec.frames // first.num_envs,
            num_envs=first.num_envs,
            group_size=len(first.group),
            seed=seed,
        )

    def take(self, handle: WorkerHandle) -> Filled:
        filled = super().take(handle)
        if self._recorder is not None:
            stamps = filled.frames.stamps(filled.steps)
            generation, newest = filled.generation, filled.newest
            self._recorder.note(handle.index, generation, stamps, filled.made_s, newest)
        return filled

    def counters(self) -> dict[str, Any]:
        """Where all frames are, in all and by worker."""
        workers = self.frame_counts()
        totals = {name: sum(worker[name] for worker in workers) for name in FRAME_COUNTS}
        return {**totals, "preempted": self.preempted, "workers": workers}

    def stages(self) -> list[str]:
        """What each worker does, if it reports that."""
        return [str(handle.reported_counts().get("stage", "")) for handle in self.handles]

    # -- failures

    def attend(self) -> None:
        """Replace failed workers if `on_worker_failure` says so; else raise their failures."""
        self._check_open()
        self.changed = False
        self._see_to_failures()

    def _see_to_failures(self) -> None:
        with self._recovering:
            while failed := self.failed():
                if self._options.on_worker_failure == "raise":
                    self._record_failure(failed[0])
                    self.raise_failures()
                failure = failed[0].failure
                assert failure is not None
                restarts = sum(handle.restarts for handle in self.handles)
                if restarts >= self._options.max_restarts:
                    self._record_failure(failed[0])
                    if not getattr(failure, "__notes__", None):
                        failure.add_note(
                            f"all max_restarts={self._options.max_restarts} are used up"
                        )
                    raise failure
                self.replace(failed[0])

    def _record_failure(self, handle: WorkerHandle) -> None:
        """Record what the worker was doing, so that a replay fails in the same way."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        for lost in handle.finished:
            stamps = lost.frames.stamps(lost.steps)
            recorder.note_lost(handle.index, lost.generation, stamps)
        so_far = handle.stamps_so_far(min(handle.ordered)) if handle.ordered else None
        if so_far is not None:
            recorder.note_lost(handle.index, handle.generation, so_far)

    def _recover(
        self, error: WorkerError, generations: Mapping[int, int], *lost: type[WorkerError]
    ) -> None:
        """Replace the workers that failed in these generations; raise other failures.

        lost: the kinds of errors after which a worker counts as failed.
        """
        self.wait(lambda: bool(self.failed()), 0.2)  # prefer the worker's own error
        with self._recovering:
            others = self.note(error, generations, lost)
            self._see_to_failures()
        if others:
            raise combine(others)

    # -- weights

    def publish(self, by_model: Mapping[str, Any], worker_ids: Any) -> None:
        """Publish the next version of these models to workers."""
        generations = self.generations()
        # An episode may last long, or until the next batch is ordered. A worker that is paused
        # during a batch applies weights after it. Do not wait for either.
        at = self._options.apply_at
        wait = False if at == "episode" or (at == "batch" and self.held) else None
        try:
            self.publisher.publish(by_model, worker_ids, wait=wait)
        except WorkerError as error:  # a replacement gets the newest weights when it starts
            self._recover(error, generations, WorkerDied)

    # -- control

    def ask(
        self,
        method: str,
        arguments: Callable[[WorkerHandle], tuple[Any, ...]] = lambda handle: (),
        handles: Sequence[WorkerHandle] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a method of workers between two steps; the results, in worker order.

        Workers that fail are replaced and called again.
        """
        self._check_open()
        restarts = self._options.on_worker_failure == "restart"
        lost = (WorkerDied, WorkerTimeout) if restarts else ()
        while True:
            generations = self.generations()
            try:
                return self.call(method, arguments, handles, timeout)
            except WorkerError as error:
                if self.closed:
                    raise
                self._recover(error, generations, *lost)

    def attributes(self, name: str) -> list[Any]:
        """This attribute of each worker's environments, in worker order."""
        return self.ask("getattr_env", lambda handle: (name,))

    def reseed(self, seeds: Seeds) -> None:
        """Seed all workers, and start new episodes."""
        self._check_not_recording("set_seed")
        for handle in self.handles:
            handle.spec.seeds = replace(handle.spec.seeds, seed=seeds.seed, static=seeds.static)
        self.ask("set_seed", lambda handle: (handle.spec.seeds,))

    def reset(self, which: np.ndarray[Any, Any] | None) -> None:
        """Start new episodes in all environments, or in those of a mask over all workers."""
        self._check_not_recording("reset")
        if which is None:
            self.ask("reset", lambda handle: (None,))
            return
        of = {h: which[h.first_env : h.first_env + h.num_envs] for h in self.handles}
        self.ask("reset", lambda handle: (of[handle],), [h for h in of if of[h].any()])

    def pause(self, still: bool) -> None:
        """Have workers rest, or go on."""
        self.hold(True)
        try:
            self.ask("hold", lambda handle: (still,))
        finally:
            self.hold(still)

    def _check_not_recording(self, call: str) -> None:
        """Refuse a call that changes what workers do, and that a recording does not have."""
        if self._recorder is not None:
            raise RuntimeError(
                f"{call}(): a recording of a schedule has no such call, so its replay would "
                f"differ: leave record_schedule={self._options.record_schedule!r} out"
            )

    # -- saving

    def states(self) -> list[dict[str, Any]]:
        """The state of each worker, and the numbering of its trajectories."""
        states: list[dict[str, Any]] = self.ask("state_dict")
        for handle, state in zip(self.handles, states, strict=True):
            state["trajectories"] = handle.trajectories.state_dict()
        return states

    def load_states(self, states: list[dict[str, Any]], base: int) -> list[Restored]:
        """Restore each worker's state, with versions counted from `base`; whether each one was
        restored to the bit."""
        # Asynchronous workers were ahead of what was delivered. Those frames are gone, and so are
        # the frames that they collected here before.
        if self._recorder is not None:
            self._recorder.note_resumed()
        of = dict(zip(self.handles, states, strict=True))
        timeout, held = self._timeout + self._options.resume_timeout, self.held
        self.hold(True)  # no frames are expected of a worker that replays episodes
        try:
            answers = self.ask(
                "load_state_dict",
                lambda handle: (of[handle], base, self._shares_batch),
                timeout=timeout,
            )
        finally:
            self.hold(held)
        for (handle, state), (restored, first) in zip(of.items(), answers, strict=True):
            self.drop_before(handle, first)
            handle.trajectories.load_state_dict(state["trajectories"], under_way=restored.under_way)
            handle.numbered = handle.generation
            spec = handle.spec
            spec.seeds = Seeds(**state["seeds"])
            spec.options["random_frames"] = handle.collected + state.get("random_frames", 0)
        return [restored for restored, _ in answers]


def check_alike(names: Sequence[str], layouts: Sequence[FrameLayout], otherwise: str) -> None:
    """Refuse frames of different shapes or types: one batch cannot hold both."""
    entries = [
        {key: (field.shape, field.dtype) for key, field in layout.fields.items()}
        for layout in layouts
    ]
    first = entries[0]
    for name, other in zip(names, entries, strict=True):
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                raise ValueError(
                    f"{names[0]} and {name} differ in {name_of(key)!r}: one batch cannot hold "
                    f"both ({otherwise} returns them separately)"
                )
