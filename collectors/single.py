"""The collector of one process, which steps environments and calls the policy itself."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from collectors.base import BaseCollector
from collectors.data.batch import WorkerBatch
from collectors.in_process import InProcessPool, InProcessWorker, closed_on_error
from collectors.options.collector_options import SINGLE, steps_of
from collectors.rollout.frame_block import FrameBlock, FrameLayout
from collectors.rollout.policy import PolicyCaller, shift_worker
from collectors.rollout.shared_counters import FRAMES
from collectors.weights.model_ids import copied, find_model
from collectors.weights.publisher import Publisher
from collectors.weights.rollout_weights import RolloutWeights, SchemeWeights
from sync.errors import WorkerTimeout


class SinglePool(InProcessPool):
    """One worker, which may collect in a thread of its own.

    is_stopping: whether the collector ends. check_open: raises if it has ended.
    in_background: whether this thread is the collector's own.
    """

    def __init__(
        self,
        *args: Any,
        frames: int,
        is_stopping: Callable[[], bool],
        check_open: Callable[[], None],
        in_background: Callable[[], bool],
        **options: Any,
    ):
        super().__init__(*args, num_workers=1, **options)
        self._check_open, self._in_background = check_open, in_background
        self._blocks: dict[FrameLayout, FrameBlock] = {}
        opts, (device,) = self.options, self.options.devices(1)
        environments = self.make_environments(0, self.seeds, opts)
        with closed_on_error(environments):
            self.num_envs = environments.num_envs
            self._steps = steps_of(frames, self.num_envs)
            receiver, policy = self._take_weights(device)
            acting = None
            if policy is not None:
                acting = PolicyCaller(policy, environments.observations, opts, device=device)
            self._one = self.handles[0] = InProcessWorker(
                environments,
                acting,
                receiver,
                self.numbering[0],
                self.seeds,
                opts,
                index=opts.worker_idx or 0,
                random_frames=opts.init_random_frames,
                take_at_start=self._take_due,
                poll_control=lambda: not is_stopping(),
            )
            if opts.compile_policy:
                with self._one.active():
                    self._one.rollout.plan(self._steps)

    def _take_weights(self, device: torch.device | None) -> tuple[RolloutWeights, Any]:
        """The policy that acts here, and the receiver of its weights."""
        publisher, options = self.publisher, self.options
        if not publisher.schemes or publisher.is_direct:
            policy = publisher.policy
            if isinstance(policy, nn.Module) and device is not None:
                policy.to(device)
            for scheme in publisher.schemes.values():
                scheme.connect()
            return DirectWeights(publisher), policy
        if options.policy_factory is not None:
            policy = options.policy_factory()  # type: ignore[operator]
        else:
            policy = copied(publisher.policy)
        shift_worker(policy, options.worker_idx or 0)
        if isinstance(policy, nn.Module) and device is not None:
            policy.to(device)
        receivers = {}
        for model_id, scheme in publisher.schemes.items():
            receiver = copy.deepcopy(scheme)
            model = find_model(policy, model_id)
            receiver.init_on_receiver(model_id=model_id, model=model, worker_idx=0)
            _meet(scheme, receiver)
            receivers[model_id] = receiver
        return SchemeWeights(receivers), policy

    def _take_due(self) -> None:
        """Apply all published versions, waiting for those in flight."""
        self._one.receiver.take_at_least(self.publisher.promised[0], self.options.timeout)

    # -- turns: it is always the one worker's

    def next(self) -> list[InProcessWorker]:
        """The workers whose frames are the next batch."""
        return [self._one]

    def taken(self) -> None:
        """The batch was taken."""

    def take(self, worker: InProcessWorker) -> WorkerBatch:
        """Its next batch, which is collected now."""
        newest = self.publisher.version
        with contextlib.nullcontext() if self._in_background() else worker.active():
            if self.options.apply_at != "episode" and worker.receiver.has_news():
                worker.receiver.take()
            try:
                blocks = {} if self.options.use_buffers is False else self._blocks
                batch = worker.collect(self._steps, blocks)
                self._check_open()  # if another thread shut down, the block was cut short
            except BaseException:
                self._lose(worker)
                raise
        batch.newest = newest
        self.delivered += batch.num_frames
        return batch

    def discard(self, batch: WorkerBatch) -> None:
        super().discard(batch)
        self._lose(self._one)

    def _lose(self, worker: InProcessWorker) -> None:
        """The frames since the last batch are lost, and new episodes follow."""
        worker.rollout.lose()
        self.dropped = worker.rollout.counters[FRAMES] - self.delivered

    def publish(self, by_model: Mapping[str, Any], worker_ids: Any) -> None:
        """Publish the next version of these models, and apply it if no thread collects."""
        self.publisher.publish(by_model, worker_ids, wait=False)
        receiver = self._one.receiver
        if not isinstance(receiver, SchemeWeights) or self.options.apply_at == "episode":
            return  # the current episode may last long
        schemes = [self.publisher.schemes[model_id] for model_id in by_model]
        deadline = time.monotonic() + self.options.timeout
        while True:  # a collecting thread applies them between two steps; else this one does
            if self._lock.acquire(0.0):
                try:
                    receiver.take()
                finally:
                    self._lock.release()
            elif not any(scheme.sync for scheme in schemes):
                return
            try:
                for scheme in schemes:
                    scheme.wait_async(0.05)
                return
            except WorkerTimeout:
                if time.monotonic() > deadline:
                    raise

    def counters(self) -> dict[str, Any]:
        """Where all frames are."""
        delivered, dropped = self.delivered, self.dropped
        collected = self._one.rollout.counters[FRAMES]  # last: another thread may be collecting
        return {
            "collected": collected,
            "delivered": delivered,
            "dropped": dropped,
            "in_flight": collected - delivered - dropped,
            "restarts": 0,
            "preempted": 0,
        }


class Collector(BaseCollector):
    """Collects in this process, one batch at a time, when it is requested.

    It has a copy of the policy, so that training steps reach it only through
    `update_policy_weights_`; with `NoWeightSyncScheme` it uses the policy object itself.
    """

    kind = SINGLE

    def _make_publisher(self) -> Publisher:
        options = self.options
        return Publisher(
            self._source(),
            options.weight_sync_schemes,
            devices=options.devices(1),
            timeout=options.timeout,
            updater=options.weight_updater,
        )

    def _open(self) -> None:
        self.pool = self.turns = SinglePool(
            self.publisher,
            self.options,
            create_env_fn=self.create_env_fn,
            seeds=self.seeds,
            lock=self._lock,
            frames=self.frames_per_batch,
            is_stopping=lambda: self._shut,
            check_open=self._raise_error,
            in_background=lambda: threading.current_thread() is self._thread,
        )

    @property
    def frames_per_batch(self) -> int:
        return int(self.options.frames_per_batch)  # type: ignore[arg-type]


class DirectWeights(RolloutWeights):
    """The trainer's own policy: its version is the one last published."""

    def __init__(self, publisher: Publisher):
        self._publisher = publisher

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._publisher.version


def _meet(sender: Any, receiver: Any) -> None:
    """Connect both ends of a scheme within one process."""
    raised: list[BaseException] = []

    def connect() -> None:
        try:
            receiver.connect(background=False)
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    try:
        sender.connect()
    finally:
        thread.join(1.0)
    if raised:
        raise raised[0]
