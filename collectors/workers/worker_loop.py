"""The process of a worker: one loop in one thread.

    trainer                                   worker
    -------                                   ------
    start the process                    ->   make policy and environments
                                         <-   Hello (number of environments), or Failed
    publish version 0 (schemes)          <->  apply it; compile the policy if told
                                         <-   Met
    collect (block b)                    ->   queue it; plan the blocks at the first, share them
                                         <-   Blocks (layout)
                                              fill block b
                                         <-   Filled (block b, steps, times)
    call (method, arguments)             ->   between two steps: do it
                                         <-   Answer
    stop                                 ->   close the environments, leave

The trainer's death is noticed by a thread that sleeps until then; it ends the process at once.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import nn

from collectors.options.collector_options import steps_of
from collectors.options.rollout_options import RolloutOptions
from collectors.rollout.environment import Environments, Restored
from collectors.rollout.frame_block import FrameBlock, FrameLayout, map_blocks
from collectors.rollout.make_environment import make_environments
from collectors.rollout.policy import PolicyCaller, shift_worker
from collectors.rollout.rollout import Rollout
from collectors.rollout.seeds import Seeds, Streams
from collectors.rollout.shared_counters import (
    CUT,
    FRAMES,
    IDLE,
    MESSAGES,
    STAGE,
    TAKING_WEIGHTS,
    SharedCounters,
)
from collectors.weights.model_ids import find_model
from collectors.weights.rollout_weights import RolloutWeights, SchemeWeights
from collectors.workers.messages import Blocks, CallResult, Failed, Filled, Hello, Met
from collectors.workers.pipe import Pipe, PipeClosed, dumps
from collectors.workers.process_lifetime import exit_now, exit_with_parent, settle_in
from collectors.workers.worker_spec import WorkerSpec
from sync import NoWeightSyncScheme, WeightSyncScheme
from sync.local.memory import AnonymousMemory, SharedFd
from sync.local.waiting import wait_for


@dataclass
class WorkerSetup:
    """The arguments of a worker's process."""

    worker_idx: int
    trainer_pid: int
    pipe: Pipe
    counters: SharedCounters
    spec: AnonymousMemory
    blocks: SharedFd  # where the blocks of frames will be
    schemes: Mapping[str, WeightSyncScheme]
    start_method: str  # of processes that an environment starts
    version_base: int = 0


@dataclass
class BatchOrder:
    """One block to fill, with weights no older than `versions`."""

    block: int
    serial: int
    versions: Mapping[str, int]


class _Stop(Exception):
    """The trainer asked the worker to stop."""


def main(setup: WorkerSetup) -> None:
    """Run a worker until the trainer stops it or is gone."""
    gc.freeze()  # objects inherited by a fork are for the trainer to release, e.g. Ray's handles
    settle_in(setup.start_method)
    exit_with_parent(setup.trainer_pid)
    exit_now(serve(setup))


def serve(setup: WorkerSetup) -> int:
    """Run a worker in this thread; the exit status of its process."""
    worker: WorkerLoop | None = None
    status = 0
    try:
        worker = WorkerLoop(setup)
        worker.prepare()
        worker.run()
    except (_Stop, PipeClosed):
        pass
    except BaseException as error:  # noqa: BLE001 - it is the trainer's to know
        status = 1
        with contextlib.suppress(PipeClosed, TimeoutError):
            text = f"raised {type(error).__name__} while {setup.counters.stage}"
            report = f"{text}:\n{traceback.format_exc().rstrip()}"
            setup.pipe.send(Failed(report), timeout=5.0)
    if worker is not None:
        worker.close()
    return status


class WorkerLoop:
    """The parts of a worker, and the loop that serves the trainer."""

    def __init__(self, setup: WorkerSetup):
        self.pipe = setup.pipe
        self.counters = setup.counters
        self._setup = setup
        self._orders: deque[BatchOrder] = deque()
        self._order: BatchOrder | None = None
        self._handed_over = 0  # the serial of the last block
        self._seen = 0
        self._paused = False
        self._rested_s = 0.0  # in pauses within a batch
        self._blocks: list[FrameBlock] = []
        self._close_env = True
        self._environments: Environments | None = None
        self.receiver: RolloutWeights = RolloutWeights()

    def prepare(self) -> None:
        """Make policy and environments, and take version 0."""
        self.spec = spec = WorkerSpec.unpack(self._setup.spec)
        torch.set_num_threads(spec.num_threads)
        self.policy = spec.policy_factory() if spec.policy_factory is not None else spec.policy
        if isinstance(self.policy, nn.Module) and spec.policy_device is not None:
            self.policy.to(spec.policy_device)
        shift_worker(self.policy, self._setup.worker_idx)
        options = RolloutOptions(**{f.name: spec.options[f.name] for f in fields(RolloutOptions)})
        self._timeout = spec.options["timeout"]
        self._environments = environments = make_environments(
            spec.create_env_fn,
            spec.create_env_kwargs,
            options,
            worker_idx=spec.seeds.worker,
            seed=spec.seeds.factory(),
        )
        self.num_steps = steps_of(spec.frames, environments.num_envs)
        schemes = self._receiving_schemes()
        self.pipe.send(Hello(environments.num_envs, str(environments)))
        self.receiver = self._connect(schemes)
        acting = None
        if self.policy is not None:
            observations, device = environments.observations, spec.policy_device
            acting = PolicyCaller(self.policy, observations, options, device=device)
        self.rollout = Rollout(
            environments,
            acting,
            self.receiver,
            spec.seeds,
            options,
            random_frames=spec.options["random_frames"],
            take_at_start=self._take_due,
            counters=self.counters,
            poll_control=self._poll_control,
        )
        if options.compile_policy:
            self.rollout.plan(self.num_steps)  # calls the policy, for the first time
        self.pipe.send(Met())

    def _receiving_schemes(self) -> dict[str, WeightSyncScheme]:
        """The schemes by model, ready for the trainer, which meets whoever has said hello."""
        schemes = {
            model_id: scheme
            for model_id, scheme in self._setup.schemes.items()
            if not isinstance(scheme, NoWeightSyncScheme)
        }
        for model_id, scheme in schemes.items():
            model = find_model(self.policy, model_id)
            index = self._setup.worker_idx
            scheme.init_on_receiver(model_id=model_id, model=model, worker_idx=index)
            # The trainer comes when the slowest worker is ready.
            scheme.connect_timeout = max(
                scheme.connect_timeout, self.spec.options["start_timeout"] + self._timeout
            )
        return schemes

    def _connect(self, schemes: Mapping[str, WeightSyncScheme]) -> RolloutWeights:
        """Take version 0."""
        for scheme in schemes.values():
            scheme.connect(background=False)
        return SchemeWeights(schemes, self._setup.version_base) if schemes else RolloutWeights()

    def run(self) -> None:
        """Fill blocks as they are ordered, until `_Stop`."""
        self._take()
        while True:
            while self._paused or not self._orders:
                self._rest()
            self._collect(self._orders.popleft())

    def _rest(self) -> None:
        """Sleep until there is a message or a version to apply, and handle it."""
        self.counters.values[STAGE] = IDLE
        between = self.rollout.may_take
        if between:
            self.receiver.wait(60.0, [self.pipe.fd])
        else:  # versions that come now are for after this batch or episode
            wait_for([self.pipe.fd], 60.0)
        if self.pipe.ended:
            raise PipeClosed("the trainer closed the connection")
        self._read_messages()
        if between:
            self._take()

    def _take(self) -> None:
        """Apply new weights, if there are any."""
        if self.receiver.has_news():
            self.counters.values[STAGE] = TAKING_WEIGHTS
            self.receiver.take()

    def _take_due(self) -> None:
        """Apply new weights, waiting for the versions that the order names."""
        if self._order is not None:
            self.counters.values[STAGE] = TAKING_WEIGHTS
            self.receiver.take_at_least(self._order.versions, self._timeout)
            self._take()

    def _collect(self, order: BatchOrder) -> None:
        counters, rollout = self.counters.values, self.rollout
        self._order = order
        if rollout.apply_at != "episode":
            self._take_due()
        began, rested_before = time.monotonic(), self._rested_s
        if not self._blocks:
            self._share(rollout.plan(self.num_steps))
        frames = self._blocks[order.block]
        before = counters[FRAMES]
        steps = rollout.collect(frames)
        self._order = None
        count = counters[FRAMES] - before
        made_s = time.monotonic() - began - (self._rested_s - rested_before)
        ended_ns = time.perf_counter_ns()
        self.pipe.send(Filled(order.serial, order.block, steps, count, made_s, ended_ns))
        self._handed_over = order.serial

    def _share(self, layout: FrameLayout) -> None:
        """Create the blocks, and tell the trainer what they are."""
        self._blocks = map_blocks(self._setup.blocks.fd, layout, self.spec.num_blocks)
        self.pipe.send(Blocks(layout))

    # -- between two steps

    def _poll_control(self) -> bool:
        """Handle messages; False if the block must end here."""
        counters = self.counters.values
        if counters[MESSAGES] != self._seen:
            self._read_messages()
            rested_at = time.monotonic()
            while self._paused:
                self._rest()
            self._rested_s += time.monotonic() - rested_at
        return self._order is None or counters[CUT] != self._order.serial

    def _read_messages(self) -> None:
        self._seen = self.counters.values[MESSAGES]
        for kind, *rest in self.pipe.receive():
            if kind == "collect":
                self._orders.append(BatchOrder(*rest))
            elif kind == "call":
                self._answer(*rest)
            elif kind == "stop":
                self._close_env = rest[0]
                raise _Stop

    def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            result = dumps(getattr(self, f"do_{method}")(*args))
            answer = CallResult(number, True, result)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}"
            answer = CallResult(number, False, text)
        self.pipe.send(answer)

    # -- what the trainer can call

    def do_hold(self, still: bool) -> None:
        """Rest, or go on."""
        self._paused = still

    def do_getattr_env(self, name: str) -> Any:
        return self.rollout.attribute(name)

    def do_set_seed(self, seeds: Seeds) -> None:
        self.rollout.reseed(seeds)

    def do_reset(self, which: np.ndarray[Any, Any] | None) -> None:
        self.rollout.restart(which)

    def do_state_dict(self) -> dict[str, Any]:
        return {**self.rollout.state_dict(), "streams": Streams().state_dict()}

    def do_load_state_dict(
        self, state: dict[str, Any], base: int, goes_on: bool
    ) -> tuple[Restored, int]:
        """Go on from there; how far, and the first batch whose frames count."""
        first = 0 if goes_on else self._handed_over + 1
        if not goes_on and self._order is not None and self.rollout.frames is not None:
            self.counters.values[CUT] = self._order.serial
            first = self._order.serial + 1
        restored = self.rollout.load_state_dict(state, goes_on=goes_on)
        streams = Streams()
        streams.load_state_dict(state["streams"])
        streams.resume()
        self.receiver.rebase(base)
        return restored, first

    def close(self) -> None:
        """Let the trainer's memory go, and close the environments."""
        self.receiver.close()
        if self._environments is None or not self._close_env:
            return
        try:
            self._environments.close()
        except Exception:  # noqa: BLE001 - the worker ends all the same, but not in silence
            traceback.print_exc()
