"""A worker without a process: its own environments, episodes and random streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from collectors.data.batch import Filled, Trajectories
from collectors.rollout.environment import Environments, Restored
from collectors.rollout.frame_block import FrameBlock, allocate
from collectors.rollout.loop import RANDOM_VERSION, Rollout
from collectors.rollout.policy import PolicyCaller
from collectors.rollout.seeds import Streams, untouched_streams
from collectors.schedule.plan import PlannedBatch
from collectors.schedule.versions import Load, Versions
from collectors.weights.receiver import WeightReceiver

Plan = tuple[tuple[int, int], ...]


class PlannedReceiver(WeightReceiver):
    """Takes the versions that a plan says, at the steps that it says."""

    rollout: Rollout

    def __init__(self, versions: Versions, load: Load, worker: int):
        self._versions = versions
        self._load = load  # into the worker's own policy
        self._worker = worker
        self._left: list[tuple[int, int]] = []  # of the plan, the last pair first
        self._newest = -1
        self.version = -1
        self.loaded = -1  # of the worker's own policy

    def begin(self, plan: Plan) -> None:
        """A batch begins. Random actions, which have no version, change nothing here."""
        self._left = [pair for pair in reversed(plan) if pair[1] != RANDOM_VERSION]
        if self.version < 0:
            self._newest = self._left[-1][1] if self._left else max(self._versions.blocks)
            self._use_newest()
        self._newest = self.version
        self._use()

    def has_news(self) -> bool:
        while self._left and self._left[-1][0] <= self.rollout.t:
            self._newest = self._left.pop()[1]
        return self._newest != self.version

    def take(self) -> None:
        if self.has_news():
            self._use_newest()

    def _use_newest(self) -> None:
        self.version = self._newest
        self._use()
        self._versions.applied(self._worker, self.version)

    def _use(self) -> None:
        """Act with this version. Only the parameters are shared with other workers."""
        is_loaded, self.loaded = self.loaded == self.version, self.version
        self._versions.use(self.version, None if is_loaded else self._load)


class VirtualWorker:
    """Computes the frames of one worker's batches, in the order in which it makes them.

    It has its own random streams, and leaves those of the process unchanged.
    """

    def __init__(
        self,
        index: int,
        generation: int,
        environments: Environments,
        acting: PolicyCaller | None,
        versions: Versions,
        load: Load,
        trajectories: Trajectories,
        *,
        first_env: int,
        num_threads: int,
        **options: Any,
    ):
        self.index = index
        self.generation = generation
        self.environments = environments
        self.trajectories = trajectories
        self.first_env = first_env
        self.receiver = PlannedReceiver(versions, load, index)
        self._num_threads = num_threads
        with untouched_streams():
            self.rollout = Rollout(environments, acting, self.receiver, **options)
            self.streams = Streams()
        self.receiver.rollout = self.rollout

    @contextmanager
    def active(self) -> Iterator[None]:
        """Act as a process of its own would: with its random streams and threads."""
        outside, threads = Streams(), torch.get_num_threads()
        self.streams.resume()
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            self.streams.keep()
            outside.resume()

    def collect(self, plan: PlannedBatch, num_steps: int, blocks: dict[Any, FrameBlock]) -> Filled:
        """The frames of a planned batch, in the block of `blocks` that has their layout."""
        rollout = self.rollout
        with self.active():
            rollout.t = 0
            self.receiver.begin(plan.versions)
            if rollout.apply_at != "episode":
                self.receiver.take()
            if (random_steps := _random_steps(plan, num_steps)) is not None:
                rollout.random_frames = random_steps * self.environments.num_envs
            layout = rollout.plan(num_steps)
            frames = blocks.get(layout) or blocks.setdefault(layout, allocate(layout))
            steps = rollout.collect(frames)
        return Filled(
            serial=0,
            block=0,
            steps=steps,
            num_frames=0,
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

    def load_state_dict(self, state: dict[str, Any]) -> Restored:
        with self.active():
            restored = self.rollout.load_state_dict(state, has_weights=True)
        self.streams.load_state_dict(state["streams"])
        self.receiver.version, self.receiver.loaded = int(state["version"]), -1
        return restored


def _random_steps(plan: PlannedBatch, num_steps: int) -> int | None:
    """How many steps the plan begins with random actions; None if it does not say."""
    if plan.versions[0][1] != RANDOM_VERSION:
        return None
    return plan.versions[1][0] if len(plan.versions) > 1 else num_steps
