"""Workers that this process computes itself: the one of a `Collector`, or virtual ones.

A worker's frames depend on its random streams and on the version at each step, and on nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from collectors.base import BaseCollector
from collectors.data.batch import Filled, Trajectories
from collectors.options import per_worker
from collectors.rollout.environment import Environments, Restored
from collectors.rollout.frame_block import FrameBlock, FrameLayout, allocate
from collectors.rollout.loop import Rollout
from collectors.rollout.make_environment import make_environments
from collectors.rollout.policy import PolicyCaller
from collectors.rollout.rollout_options import RolloutOptions
from collectors.rollout.seeds import Seeds, Streams, untouched_streams
from collectors.weights.receiver import WeightReceiver


class InProcessWorker:
    """One worker's environments, episodes and random streams.

    index: of the worker in batches. num_threads: of torch; None for those of the process.
    hooks: further arguments of `Rollout`.
    """

    def __init__(
        self,
        environments: Environments,
        acting: PolicyCaller | None,
        receiver: WeightReceiver,
        trajectories: Trajectories,
        seeds: Seeds,
        options: RolloutOptions,
        *,
        index: int,
        first_env: int = 0,
        num_threads: int | None = None,
        **hooks: Any,
    ):
        self.environments, self.receiver, self.trajectories = environments, receiver, trajectories
        self.index, self.generation, self.first_env = index, seeds.generation, first_env
        self._num_threads = num_threads
        with untouched_streams():
            self.rollout = Rollout(environments, acting, receiver, seeds, options, **hooks)
            self.streams = Streams()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Act as a process of its own would: with its random streams and threads."""
        outside, threads = Streams(), torch.get_num_threads()
        self.streams.resume()
        torch.set_num_threads(self._num_threads or threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            self.streams.keep()
            outside.resume()

    def collect(self, num_steps: int, blocks: dict[FrameLayout, FrameBlock]) -> Filled:
        """The frames of its next batch, in the block of `blocks` that has their layout."""
        layout = self.rollout.plan(num_steps)
        frames = blocks.get(layout) or blocks.setdefault(layout, allocate(layout))
        steps = self.rollout.collect(frames)
        return Filled(
            serial=0,
            block=0,
            steps=steps,
            num_frames=int(np.count_nonzero(frames.live[:steps])),
            content=frames,
            worker=self.index,
            first_env=self.first_env,
            generation=self.generation,
            trajectories=self.trajectories,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.rollout.state_dict(),
            "streams": self.streams.state_dict(),
            "version": self.receiver.version,
            "generation": self.generation,
        }

    def load_state_dict(self, state: dict[str, Any], *, has_weights: bool) -> Restored:
        with self.active():
            restored = self.rollout.load_state_dict(state, has_weights=has_weights)
        self.streams.load_state_dict(state["streams"])
        return restored


class InProcessCollector(BaseCollector):
    """Computes one batch of one worker at a time."""

    _keeps_weights = False  # whether a state has the weights of the episodes that go on
    num_envs = 0

    def _prepare(self) -> None:
        n = self.num_workers
        self._workers: dict[int, InProcessWorker] = {}
        self._blocks: dict[FrameLayout, FrameBlock] = {}
        self._factories = per_worker(self.create_env_fn, n, "create_env_fn")
        self._kwargs = per_worker(self.options.create_env_kwargs, n, "create_env_kwargs")
        self._numbering = [Trajectories(worker, n) for worker in range(n)]
        self._delivered = self._dropped = 0

    def _make_environments(self, index: int, seeds: Seeds, options: RolloutOptions) -> Environments:
        return make_environments(
            self._factories[index],
            self._kwargs[index],
            options,
            worker_idx=seeds.worker if self.worker_idx is None else self.worker_idx,
            seed=seeds.factory(),
        )

    def _worker(self, index: int, generation: int) -> InProcessWorker:
        """The worker in this generation."""
        return self._workers[index]

    @property
    def frames_per_batch(self) -> int:
        return int(self.options.frames_per_batch)  # type: ignore[arg-type]

    def worker_stages(self) -> list[str]:
        return []

    def made_batches(self) -> list[Filled]:
        return []

    # -- control

    def _hold(self, still: bool) -> None:
        """Nothing runs between two calls."""

    def _reseed(self) -> None:
        with self._lock:
            for index, worker in self._workers.items():
                seeds = replace(self.seeds.of_worker(index), generation=worker.generation)
                with worker.active():
                    worker.rollout.reseed(seeds)

    def _restart(self, which: np.ndarray[Any, Any] | None) -> None:
        with self._lock:
            for worker in self._workers.values():
                first, count = worker.first_env, worker.environments.num_envs
                with worker.active():
                    worker.rollout.restart(None if which is None else which[first : first + count])

    def _attributes(self, name: str) -> list[Any]:
        with self._lock:
            workers = [self._workers.get(i) or self._worker(i, 0) for i in range(self.num_workers)]
            return [worker.environments.attribute(name) for worker in workers]

    # -- saving and ending

    def _worker_states(self) -> list[dict[str, Any]]:
        states = []
        for index, trajectories in enumerate(self._numbering):
            worker = self._workers.get(index)
            state = {} if worker is None else worker.state_dict()
            states.append({**state, "trajectories": trajectories.state_dict()})
        return states

    def _load_worker_states(self, states: list[dict[str, Any]], base: int) -> list[Restored]:
        workers = []
        for index, state in enumerate(states):
            restored = Restored(True, [])
            if "seeds" in state:  # else it had not begun
                worker = self._worker(index, int(state.get("generation", 0)))
                restored = worker.load_state_dict(state, has_weights=self._keeps_weights)
                worker.receiver.restore(base, int(state.get("version", 0)))
            numbering = self._numbering[index]
            numbering.load_state_dict(state["trajectories"], under_way=restored.under_way)
            workers.append(restored)
        return workers

    def _close(self, timeout: float, close_env: bool) -> None:
        # A thread that collects at this moment stops at its next step.
        if not self._lock.acquire(timeout):
            return
        with contextlib.ExitStack() as after:
            after.callback(self._lock.release)
            for worker in getattr(self, "_workers", {}).values():
                if close_env:
                    after.callback(worker.environments.close)
                after.callback(worker.receiver.close)


@contextlib.contextmanager
def closed_on_error(environments: Environments) -> Iterator[None]:
    """Close the environments if there is an error before a worker has them."""
    try:
        yield
    except BaseException:
        environments.close()
        raise
