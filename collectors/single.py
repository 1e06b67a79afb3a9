"""The collector of one process, which steps environments and calls the policy itself."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from collectors.base import BaseCollector, as_mask, ends_on_interrupt
from collectors.data.batch import Filled, Trajectories, frames_of
from collectors.options import SINGLE, per_worker, steps_of
from collectors.rollout.environment import Environments, Restored
from collectors.rollout.frame_block import FrameBlock, allocate
from collectors.rollout.loop import Rollout
from collectors.rollout.make_environment import make_environments
from collectors.rollout.policy import PolicyCaller, shift_worker
from collectors.rollout.seeds import Streams, untouched_streams
from collectors.weights.models import copied, find_model
from collectors.weights.publisher import Publisher
from collectors.weights.receiver import SchemeReceiver, WeightReceiver
from collectors.workers.shared_counters import FRAMES
from sync.errors import WorkerTimeout


class Collector(BaseCollector):
    """Collects in this process, one batch at a time, when it is requested.

    It has a copy of the policy, so that training steps reach it only through
    `update_policy_weights_`; with `NoWeightSyncScheme` it uses the policy object itself.
    """

    kind = SINGLE
    environments: Environments | None = None

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
        options = self.options
        (device,) = options.devices(1)
        (create_env_fn,) = per_worker(self.create_env_fn, 1, "create_env_fn")
        self.environments = make_environments(
            create_env_fn,
            options.create_env_kwargs,  # type: ignore[arg-type]
            options,
            worker_idx=self.seeds.worker if self.worker_idx is None else self.worker_idx,
            seed=self.seeds.factory(),
        )
        self._steps = steps_of(self.frames_per_batch, self.environments.num_envs)
        self._trajectories = Trajectories()
        self._delivered = self._dropped = 0
        self._receiver, self._acting_policy = self._take_weights(device)
        acting = None
        if self._acting_policy is not None:
            observations = self.environments.observations
            acting = PolicyCaller(self._acting_policy, observations, options, device=device)
        with untouched_streams():
            self._rollout = Rollout(
                self.environments,
                acting,
                self._receiver,
                self.seeds,
                options,
                random_frames=options.init_random_frames,
                take_at_start=self._take_due,
                poll_control=lambda: not self._stopping,
            )
            if options.compile_policy:  # now, while an outer collector allows time for it
                self._rollout.plan(self._steps)
            self._streams = Streams()
        self._block: FrameBlock | None = None

    def _take_weights(self, device: torch.device | None) -> tuple[WeightReceiver, Any]:
        """The policy that acts here, and the receiver of its weights."""
        publisher, options = self.publisher, self.options
        if not publisher.schemes or publisher.is_direct:
            policy = publisher.policy
            if isinstance(policy, nn.Module) and device is not None:
                policy.to(device)
            for scheme in publisher.schemes.values():
                scheme.connect()
            return Direct(publisher), policy
        if options.policy_factory is not None:
            policy = options.policy_factory()  # type: ignore[operator]
        else:
            policy = copied(publisher.policy)
        shift_worker(policy, self.worker_idx or 0)
        if isinstance(policy, nn.Module) and device is not None:
            policy.to(device)
        receivers = {}
        for model_id, scheme in publisher.schemes.items():
            receiver = copy.deepcopy(scheme)
            model = find_model(policy, model_id)
            receiver.init_on_receiver(model_id=model_id, model=model, worker_idx=0)
            _meet(scheme, receiver)
            receivers[model_id] = receiver
        return SchemeReceiver(receivers), policy

    def _take_due(self) -> None:
        """Apply all published versions, waiting for those in flight."""
        self._receiver.take_at_least(self.publisher.promised[0], self.options.timeout)

    @property
    def num_envs(self) -> int:
        """The environments."""
        assert self.environments is not None
        return self.environments.num_envs

    @property
    def frames_per_batch(self) -> int:
        return int(self.options.frames_per_batch)  # type: ignore[arg-type]

    def _gather(self) -> TensorDict:
        alone = threading.current_thread() is not self._thread
        if alone:
            outside = Streams()
            self._streams.resume()
        try:
            return self._collect()
        finally:
            if alone:
                self._streams.keep()
                outside.resume()

    def _collect(self) -> TensorDict:
        options, rollout = self.options, self._rollout
        assert self.environments is not None
        if options.apply_at != "episode" and self._receiver.has_news():
            self._receiver.take()
        if self._block is None or options.use_buffers is False:
            self._block = allocate(rollout.plan(self._steps))
        try:
            steps = rollout.collect(self._block)
            self._raise_error()  # if another thread shut down, the block was cut short
            part = Filled(0, 0, steps, 0, content=self._block, worker=self.worker_idx or 0)
            part.trajectories = self._trajectories
            batch = self._batch_of([part])
        except BaseException:
            rollout.lose()
            self._dropped = rollout.counters[FRAMES] - self._delivered
            raise
        self._delivered += frames_of(batch)
        return batch

    def last_stamps(self) -> torch.Tensor:
        """The versions [environments, steps] of all steps of the last batch."""
        assert self._block is not None
        return self._block.stamps(self._rollout.t)

    def _publish(self, by_model: Mapping[str, Any], worker_ids: Any) -> None:
        self.publisher.publish(by_model, worker_ids, wait=False)
        if not isinstance(self._receiver, SchemeReceiver) or self.options.apply_at == "episode":
            return  # the current episode may last long
        schemes = [self.publisher.schemes[model_id] for model_id in by_model]
        deadline = time.monotonic() + self.options.timeout
        while True:  # a collecting thread applies them between two steps; else this one does
            if self._lock.acquire(0.0):
                try:
                    self._receiver.take()
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

    def _reseed(self) -> None:
        with self._lock, untouched_streams():
            self._rollout.reseed(self.seeds)
            self._streams.keep()

    def _worker_states(self) -> list[dict[str, Any]]:
        state = {
            **self._rollout.state_dict(),
            "streams": self._streams.state_dict(),
            "trajectories": self._trajectories.state_dict(),
        }
        return [state]

    def _load_worker_states(self, states: list[dict[str, Any]], base: int) -> list[Restored]:
        (state,) = states
        restored = self._rollout.load_state_dict(state)
        self._streams.load_state_dict(state["streams"])
        self._trajectories.load_state_dict(state["trajectories"], under_way=restored.under_way)
        self._receiver.rebase(base)
        return [restored]

    @ends_on_interrupt
    def reset(self, reset_idx: Any = None) -> None:
        """Start new episodes in all environments, or in some: numbers, or a mask."""
        self._raise_if_shut()
        which = None if reset_idx is None else as_mask(reset_idx, self.num_envs)
        with self._lock:
            self._rollout.restart(which)

    def _attributes(self, name: str) -> list[Any]:
        assert self.environments is not None
        with self._lock:
            return [self.environments.attribute(name)]

    def _counters(self) -> dict[str, Any]:
        delivered, dropped = self._delivered, self._dropped
        collected = self._rollout.counters[FRAMES]  # last: another thread may be collecting
        return {
            "collected": collected,
            "delivered": delivered,
            "dropped": dropped,
            "in_flight": collected - delivered - dropped,
            "restarts": 0,
            "preempted": 0,
        }

    def _close(self, timeout: float, close_env: bool) -> None:
        # A thread that collects at this moment stops at its next step.
        if not self._lock.acquire(timeout):
            return
        with contextlib.ExitStack() as after:
            after.callback(self._lock.release)
            if self.environments is not None and close_env:
                after.callback(self.environments.close)
            if getattr(self, "_receiver", None) is not None:
                self._receiver.close()


class Direct(WeightReceiver):
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
