"""Workers that this process computes itself: the one of a `Collector`, or virtual ones.

A worker's frames depend on its random streams and on the version at each step, and on nothing else.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from collectors.data.batch import BatchSpan, TrajectoryNumbers, WorkerBatch
from collectors.options.collector_options import CollectorOptions, per_worker
from collectors.options.rollout_options import RolloutOptions
from collectors.rollout.environment import Environments, Restored
from collectors.rollout.frame_block import FrameBlock, FrameLayout, allocate
from collectors.rollout.make_environment import make_environments
from collectors.rollout.policy import PolicyCaller
from collectors.rollout.rollout import Rollout
from collectors.rollout.seeds import Seeds, Streams, untouched_streams
from collectors.weights.publisher import Publisher
from collectors.weights.rollout_weights import RolloutWeights
from collectors.workers.fair_lock import FairLock


class InProcessWorker:
    """One worker's environments, episodes and random streams.

    index: of the worker in batches. num_threads: of torch; None for those of the process.
    hooks: further arguments of `Rollout`.
    """

    name = "worker"

    def __init__(
        self,
        environments: Environments,
        acting: PolicyCaller | None,
        receiver: RolloutWeights,
        trajectories: TrajectoryNumbers,
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

    def collect(self, num_steps: int, blocks: dict[FrameLayout, FrameBlock]) -> WorkerBatch:
        """The frames of its next batch, in the block of `blocks` that has their layout."""
        layout = self.rollout.plan(num_steps)
        frames = blocks.get(layout) or blocks.setdefault(layout, allocate(layout))
        steps = self.rollout.collect(frames)
        return WorkerBatch(
            frames,
            steps,
            num_frames=int(np.count_nonzero(frames.live[:steps])),
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


class InProcessPool(ABC):
    """Workers that this process computes itself, when their frames are taken.

    lock: held by whoever steps their environments.
    """

    keeps_weights = False  # whether a state has the weights of the episodes that go on

    def __init__(
        self,
        publisher: Publisher,
        options: CollectorOptions,
        *,
        create_env_fn: Any,
        num_workers: int,
        seeds: Seeds,
        lock: FairLock,
    ):
        n = num_workers
        self.publisher, self.options, self.num_workers, self.seeds = publisher, options, n, seeds
        self.handles: dict[int, InProcessWorker] = {}
        self.made: deque[BatchSpan] = deque()  # they are taken when they are made
        self.num_envs = 0
        self.numbering = [TrajectoryNumbers(worker, n) for worker in range(n)]
        self.delivered = self.dropped = 0  # frames
        self._lock = lock
        self._factories = per_worker(create_env_fn, n, "create_env_fn")
        self._kwargs = per_worker(options.create_env_kwargs, n, "create_env_kwargs")

    def make_environments(self, index: int, seeds: Seeds, options: RolloutOptions) -> Environments:
        """The environments of a worker."""
        worker_idx = self.options.worker_idx
        return make_environments(
            self._factories[index],
            self._kwargs[index],
            options,
            worker_idx=seeds.worker if worker_idx is None else worker_idx,
            seed=seeds.factory(),
        )

    def worker(self, index: int, generation: int = 0) -> InProcessWorker:
        """The worker in this generation."""
        return self.handles[index]

    @abstractmethod
    def take(self, turn: Any) -> WorkerBatch:
        """The batch of the worker whose turn it is, which is computed now."""

    def discard(self, batch: WorkerBatch) -> None:
        """The learner cannot use the batch that it took: its frames count as dropped."""
        self.delivered -= batch.num_frames
        self.dropped += batch.num_frames

    def release(self, batch: WorkerBatch) -> None:
        """The batch's memory can be written again."""

    @abstractmethod
    def publish(self, by_model: Mapping[str, Any], worker_ids: Any) -> None:
        """Publish the next version of these models."""

    @abstractmethod
    def counters(self) -> dict[str, Any]:
        """Where all frames are."""

    def stages(self) -> list[str]:
        """No worker does anything between two calls."""
        return []

    # -- control

    def pause(self, still: bool) -> None:
        """Nothing runs between two calls."""

    def reseed(self, seeds: Seeds) -> None:
        """Seed all workers, and start new episodes."""
        with self._lock:
            self.seeds = seeds
            for index, worker in self.handles.items():
                worker_seeds = replace(seeds.of_worker(index), generation=worker.generation)
                with worker.active():
                    worker.rollout.reseed(worker_seeds)

    def reset(self, which: np.ndarray[Any, Any] | None) -> None:
        """Start new episodes in all environments, or in those of a mask over all workers."""
        with self._lock:
            for worker in self.handles.values():
                first, count = worker.first_env, worker.environments.num_envs
                with worker.active():
                    worker.rollout.restart(None if which is None else which[first : first + count])

    def attributes(self, name: str) -> list[Any]:
        """This attribute of each worker's environments, in worker order."""
        with self._lock:
            workers = [self.handles.get(i) or self.worker(i) for i in range(self.num_workers)]
            return [worker.environments.attribute(name) for worker in workers]

    # -- saving and ending

    def states(self) -> list[dict[str, Any]]:
        """The state of each worker, and the numbering of its trajectories."""
        states = []
        for index, trajectories in enumerate(self.numbering):
            worker = self.handles.get(index)
            state = {} if worker is None else worker.state_dict()
            states.append({**state, "trajectories": trajectories.state_dict()})
        return states

    def load_states(self, states: list[dict[str, Any]], base: int) -> list[Restored]:
        """Restore each worker's state, with versions counted from `base`."""
        workers = []
        for index, state in enumerate(states):
            restored = Restored(True, [])
            if "seeds" in state:  # else it had not begun
                worker = self.worker(index, int(state.get("generation", 0)))
                restored = worker.load_state_dict(state, has_weights=self.keeps_weights)
                worker.receiver.restore(base, int(state.get("version", 0)))
            numbering = self.numbering[index]
            numbering.load_state_dict(state["trajectories"], under_way=restored.under_way)
            workers.append(restored)
        for state in states:
            if "seeds" in state:
                self.seeds = replace(self.seeds, seed=int(state["seeds"]["seed"]))
        return workers

    def close(self, timeout: float, *, close_env: bool = True) -> None:
        """End all workers. A thread that collects at this moment stops at its next step."""
        if not self._lock.acquire(timeout):
            return
        with contextlib.ExitStack() as after:
            after.callback(self._lock.release)
            for worker in self.handles.values():
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
