"""Asynchronous workers without processes: this process computes what a schedule decides.

    next()
      turns.next()                 whose batch the learner takes now, and which versions it had
      pool.take(plan)              its frames, by the same loop as a real worker's
    update_policy_weights_()
      scheme.send()                as for real workers, through all effects
      schedule.publish(version)    the clock learns of it

A worker's frames depend on its random streams and on the version at each step, and on nothing else.
So a batch is computed when it is taken; by then the schedule has decided all of its versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from collectors.base import BaseCollector, ends_on_interrupt
from collectors.data.batch import WorkerBatch
from collectors.in_process import InProcessPool, InProcessWorker, closed_on_error
from collectors.options.check_types import is_list
from collectors.options.collector_options import SIMULATED, Arguments, share_frames, steps_of, takes
from collectors.rollout.frame_block import FrameBlock, FrameLayout
from collectors.rollout.policy import PolicyCaller, shift_worker
from collectors.schedule.recording import PlannedBatch, RecordedSchedule
from collectors.simulation.simulator import Simulator
from collectors.simulation.virtual_weights import PlannedWeights, Versions, random_steps
from collectors.weights.model_ids import copied
from collectors.weights.publisher import Publisher
from sync import SimulatedWeightSyncScheme


class VirtualPool(InProcessPool):
    """Workers of a schedule. A worker's environments are created when its first batch is computed.

    frames: of a batch.
    """

    keeps_weights = True

    def __init__(
        self, *args: Any, schedule: RecordedSchedule | Simulator, frames: int, **options: Any
    ):
        super().__init__(*args, **options)
        self.schedule = schedule
        n, opts = self.num_workers, self.options
        self._device = opts.devices(n)[0]
        policy = copied(self.publisher.policy)
        if isinstance(policy, nn.Module) and self._device is not None:
            policy.to(self._device)
        self.versions = Versions(self.publisher, policy)
        self.versions.take_published()  # version 0, which all workers start with
        self._random_frames = [-(-opts.init_random_frames // n)] * n
        self._blocks: list[dict[FrameLayout, FrameBlock]] = [{} for _ in range(schedule.group_size)]
        self._taken = 0  # workers of the current batch whose frames were computed
        self._empty = 0  # steps of environments that made no frame, for instance a reset
        environments = self.worker(0).environments
        with closed_on_error(environments):
            each, together = environments.num_envs, schedule.group_size
            self._steps = steps_of(share_frames(frames, together, each=False)[0], each)
            self._check_batches(frames, each)
        self.num_envs = each * n

    def _check_batches(self, frames: int, num_envs: int) -> None:
        """Refuse a schedule of other batches than those of workers with so many environments."""
        schedule = self.schedule
        if isinstance(schedule, RecordedSchedule) and num_envs != schedule.header.num_envs:
            raise ValueError(
                f"a worker has {num_envs} environments, but in the recorded run it had "
                f"{schedule.header.num_envs}"
            )
        if self._steps != schedule.num_steps:
            raise ValueError(
                f"frames_per_batch={frames}: a batch of the schedule has "
                f"{schedule.num_steps} steps of {num_envs} environments per worker, so "
                f"{schedule.num_steps * num_envs * schedule.group_size} frames"
            )

    # -- workers

    def worker(self, index: int, generation: int = 0, steps_before: int = 0) -> InProcessWorker:
        """The worker in this generation; it replaces one of an earlier generation.

        steps_before: those that its earlier generations made.
        """
        worker = self.handles.get(index)
        if worker is not None and worker.generation == generation:
            return worker
        if worker is not None:
            worker.environments.close()
            self.numbering[index].restart()
        worker = self.handles[index] = self._make_worker(index, generation, steps_before)
        return worker

    def _make_worker(self, index: int, generation: int, steps_before: int) -> InProcessWorker:
        options = self.options
        if self.schedule.exact:  # it says at which step each version acted
            options = replace(options, apply_at="step")
        seeds = replace(self.seeds.of_worker(index), generation=generation)
        environments = self.make_environments(index, seeds, options)
        with closed_on_error(environments):
            count = environments.num_envs
            if self.num_envs and count * self.num_workers != self.num_envs:
                raise ValueError(
                    f"worker {index} has {count} environments and worker 0 has "
                    f"{self.num_envs // self.num_workers}: virtual workers must be equal"
                )
            policy, load = self.versions.copy()
            shift_worker(policy, index)
            receiver = PlannedWeights(self.versions, load, index)
            worker = InProcessWorker(
                environments,
                PolicyCaller(policy, environments.observations, options, device=self._device),
                receiver,
                self.numbering[index],
                seeds,
                options,
                index=index,
                first_env=index * count,
                num_threads=options.num_sub_threads,
                random_frames=max(0, self._random_frames[index] - steps_before * count),
            )
        receiver.rollout = worker.rollout
        return worker

    # -- turns: those of the schedule

    def next(self) -> Iterator[PlannedBatch]:
        """What the learner takes now, from each worker of a batch."""
        self._taken = 0
        while self._taken < self.schedule.group_size:
            plan = self.schedule.next_batch()
            if plan.lost:
                self.dropped += self._collect(plan).num_frames
            else:
                yield plan

    def taken(self) -> None:
        """The batch was taken: release the versions that no worker needs."""
        in_use = {worker.receiver.version for worker in self.handles.values()}
        self.versions.forget(self.schedule.oldest_needed(), in_use)

    def take(self, plan: PlannedBatch) -> WorkerBatch:
        """The batch that was planned, which is computed now."""
        batch = self._collect(plan)
        batch.newest = plan.newest
        self.delivered += batch.num_frames
        self._taken += 1
        return batch

    def _collect(self, plan: PlannedBatch) -> WorkerBatch:
        self._empty += self._steps * self.num_envs // self.num_workers  # until there are frames
        try:
            worker = self.worker(plan.worker, plan.generation, plan.steps_before)
            with worker.active():
                self._begin(worker, plan)
                batch = worker.collect(self._steps, self._blocks[self._taken])
        except Exception as error:
            error.add_note(
                f"raised by virtual worker {plan.worker}, generation {plan.generation}, at "
                f"{self.schedule.time_s:.6g} s of virtual time"
            )
            raise
        self._empty -= batch.num_frames
        return batch

    def _begin(self, worker: InProcessWorker, plan: PlannedBatch) -> None:
        """Have the worker take the versions that the plan says, at its steps."""
        receiver, rollout = worker.receiver, worker.rollout
        assert isinstance(receiver, PlannedWeights)
        rollout.t = 0
        receiver.begin(plan.versions)
        if rollout.apply_at != "episode":
            receiver.take()
        steps = random_steps(plan, self._steps)
        if steps is not None or self.schedule.exact:  # a recording says which ones are random
            rollout.random_frames = (steps or 0) * worker.environments.num_envs

    def publish(self, by_model: Mapping[str, Any], worker_ids: Any) -> None:
        """Publish the next version of these models, of which the schedule learns."""
        self.publisher.publish(by_model, worker_ids, wait=False)
        self.schedule.publish(self.publisher.version, self.versions.take_published())

    def counters(self) -> dict[str, Any]:
        """Where all frames are."""
        steps, each = self.schedule.counts(), self.num_envs // self.num_workers
        return {
            "collected": steps["collected"] * each - self._empty,
            "delivered": self.delivered,
            "dropped": steps["dropped"] * each + self.dropped,
            "in_flight": steps["in_flight"] * each,
            "restarts": steps["restarts"],
            "preempted": 0,
        }

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """The schedule, and the weights in flight."""
        return {
            "schedule": self.schedule.state_dict(),
            "versions": self.versions.state_dict(),
            "delivered": self.delivered,
            "dropped": self.dropped,
            "empty": self._empty,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; without a schedule in it, virtual time begins now."""
        if "schedule" not in state:
            assert isinstance(self.schedule, Simulator)  # a recording has no later beginning
            self.schedule.count_from(self.publisher.base)
            self.versions.count_from(self.publisher.base)
            return
        self.schedule.load_state_dict(state["schedule"])
        self.versions.load_state_dict(state["versions"])
        self.delivered = int(state["delivered"])
        self.dropped = int(state.get("dropped", 0))  # states of older versions lack these
        self._empty = int(state.get("empty", 0))


class SimulatedCollector(BaseCollector):
    """Collects the same bits as a `MultiAsyncCollector` under a given schedule.

    schedule: a `RecordedSchedule`, or a `Simulator` for the same number of workers and steps.
    """

    kind = SIMULATED
    pool: VirtualPool

    @takes(Arguments)
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        schedule: RecordedSchedule | Simulator,
        **options: Any,
    ):
        self.schedule = schedule
        super().__init__(create_env_fn, policy, **options)

    def _make_publisher(self) -> Publisher:
        options, n = self.options, self.num_workers
        source = self._source()
        schemes = options.weight_sync_schemes
        if schemes is None and isinstance(source, nn.Module):
            schemes = {"policy": SimulatedWeightSyncScheme()}
        if not schemes:
            raise ValueError(
                f"{self.kind} needs a policy with weights: it simulates how they reach workers"
            )
        return Publisher(source, schemes, devices=options.devices(n), timeout=options.timeout)

    def _open(self) -> None:
        self._check_schedule()
        self.pool = self.turns = VirtualPool(
            self.publisher,
            self.options,
            create_env_fn=self.create_env_fn,
            num_workers=self.num_workers,
            seeds=self.seeds,
            lock=self._lock,
            schedule=self.schedule,
            frames=self.frames_per_batch,
        )

    @property
    def frames_per_batch(self) -> int:
        return int(self.options.frames_per_batch)  # type: ignore[arg-type]

    def _check_schedule(self) -> None:
        """Refuse a schedule for other workers, or for another seed."""
        schedule, frames = self.schedule, self.options.frames_per_batch
        if self.num_workers != schedule.num_workers:
            raise ValueError(
                f"num_workers={self.num_workers}: the schedule is for {schedule.num_workers} "
                "workers"
            )
        if isinstance(schedule, RecordedSchedule) and self.seed != schedule.header.seed:
            raise ValueError(f"seed={self.seed}: the recorded run had seed={schedule.header.seed}")
        if is_list(frames):
            raise ValueError(
                f"frames_per_batch={frames}: virtual workers are equal, so give one number"
            )

    @ends_on_interrupt
    def skip_update(self) -> None:
        self.schedule.skip_update()

    @ends_on_interrupt
    def state_dict(self) -> dict[str, Any]:
        """The state of every collector, and also the schedule and the weights in flight."""
        return {**super().state_dict(), **self.pool.state_dict()}

    @ends_on_interrupt
    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        exact = super().load_state_dict(state)
        self.pool.load_state_dict(state)
        return exact
