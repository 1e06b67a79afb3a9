"""The base of all collectors: iteration, counting, weights, background collection, control."""

from __future__ import annotations

import sync  # noqa: F401 - before tensordict  # isort: skip
import atexit
import contextlib
import functools
import inspect
import math
import operator
import os
import sys
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from collectors.data.batch import (
    BatchSpan,
    WorkerBatch,
    assemble,
    buffer_for,
    check_alike,
    frames_of,
    split,
)
from collectors.in_process import InProcessPool
from collectors.options.check_types import shown
from collectors.options.collector_options import (
    ASYNC,
    Arguments,
    CollectorOptions,
    check_factory,
    count_workers,
    per_worker,
    takes,
)
from collectors.rollout.frame_block import FrameLayout
from collectors.rollout.policy import warn_of_training_mode
from collectors.rollout.seeds import Seeds, check_seed, fresh_seed, next_seed
from collectors.rollout.spaces import Key
from collectors.schedule.recording import Recorder
from collectors.weights.model_ids import check_apart, find_model, sends_weights
from collectors.weights.outer_versions import Chain
from collectors.weights.publisher import Publisher
from collectors.workers.fair_lock import FairLock
from collectors.workers.handle import WorkerHandle
from collectors.workers.pool import WorkerPool
from collectors.workers.turns import Turns
from sync import WeightSyncScheme

Result = TypeVar("Result")


def ends_on_interrupt(method: Callable[..., Result]) -> Callable[..., Result]:
    """Shut the collector down if an interrupt (Ctrl-C) ends this method."""

    @functools.wraps(method)
    def call(self: BaseCollector, *args: Any, **kwargs: Any) -> Result:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self._interrupted = True
            self.shutdown(timeout=1.0, raise_on_error=False)
            raise

    return call


class BaseCollector(ABC):
    """Steps environments with a policy, and returns batches of frames.

    create_env_fn: creates a gymnasium environment or a vector; or a list, one for each worker.
    policy: a module, a TensorDictModule, a function, or None for random actions. It is the source
        of the weights that `update_policy_weights_` publishes; workers have copies.

    `options.py` describes the other arguments.

    next()
      turns.next()          orders batches, and waits for those whose turn it is
      pool.take(worker)     counted as delivered
      _assemble(...)        one batch of all, or of one
      pool.release(...)     its memory can be written again
    """

    kind = "Collector"
    shares_batch = True  # workers make batches together, or else each its own
    _apart = ASYNC  # what returns the frames of workers separately
    pool: WorkerPool | InProcessPool
    turns: Any  # `Turns`, or a pool that has its own
    _frames_of: Sequence[int]  # of each worker in a batch

    @property
    def _like(self) -> str:
        """The local kind of collector whose options this one takes."""
        return self.kind

    @takes(Arguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        self._shut = True  # until there is something to shut down
        self._cut_short = False  # whether an interrupt ended its shutdown
        self._interrupted = False  # whether an interrupt ended it
        self._pid = os.getpid()
        names = inspect.signature(type(self)).parameters
        self.options = CollectorOptions.of(self.kind, options, names, like=self._like)
        check_factory(create_env_fn)
        self.num_workers = count_workers(self.kind, create_env_fn, self.options.num_workers)
        if policy is not None and not callable(policy):
            raise TypeError(f"policy must be callable, got {type(policy).__name__}")
        if policy is None and self.options.policy_factory is None:
            self.options.check_without_policy()
        self.create_env_fn = create_env_fn
        self._storing_device = self.options.storing()
        self.policy = policy
        seed = fresh_seed() if self.options.seed is None else self.options.seed
        self.seeds = Seeds(int(seed))  # of the first worker
        self.worker_idx = self.options.worker_idx
        self.frames = self.batches = 0  # delivered, also before a resumed run
        self._lock = FairLock()
        self._pauses = 0  # how many `pause` blocks the thread with the lock is in
        self._buffers: dict[tuple[FrameLayout, ...], dict[Key, Tensor]] = {}  # with copy=False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._threads_before: int | None = None
        self._chain = Chain()
        self._wait_s = 0.0
        # The newest version when the last batch was finished; None if that is not known.
        self.newest_at_end: int | None = None
        self._shut = False
        _OPEN.add(self)
        try:
            self.publisher = self._make_publisher()
            self._open()
            if self.options.weight_updater is not None:
                self.options.weight_updater.register_collector(self)
            if self.options.weight_recv_schemes:
                self.register_scheme_receiver(self.options.weight_recv_schemes)
            self._warn_of_overshoot()
        except BaseException:
            self.shutdown(timeout=1.0, raise_on_error=False)
            raise
        if self.options.num_threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self.options.num_threads)

    def _source(self) -> Any:
        """The policy whose weights are published: the given one, or the result of a factory."""
        options, source = self.options, self.policy
        if source is None and options.policy_factory is not None:
            source = per_worker(options.policy_factory, self.num_workers, "policy_factory")[0]()
        warn_of_training_mode(source)
        if not sends_weights(source, options.weight_sync_schemes):
            options.check_without_weights()
        check_apart(source, options.weight_sync_schemes or {})
        return source

    # -- what a kind of collector defines

    @abstractmethod
    def _make_publisher(self) -> Publisher:
        """The sending side of the weights."""

    def _make_handles(self) -> list[WorkerHandle]:
        """What the pool starts."""
        raise NotImplementedError

    def _open(self) -> None:
        """Start everything."""
        options = self.options
        pool = self.pool = WorkerPool(
            self.publisher, options, check_open=self._raise_error, shares_batch=self.shares_batch
        )
        self._check_equal_frames()
        handles = self._make_handles()
        pool.start([tuple(handles[group]) for group in self._groups])
        if options.record_schedule is not None:
            counts = [handle.num_envs for handle in pool.handles]
            frames, size = self._frames_of[0], self._group_size
            pool.recorder = Recorder(options.record_schedule, counts, frames, size, self.seed)
        ahead = 0 if self.shares_batch else options.batches_ahead
        self.turns = Turns(pool, ahead, options.max_lag, options.preemptive_threshold)
        self.turns.start()

    def _check_equal_frames(self) -> None:
        if self.options.record_schedule is not None and len(set(self._frames_of)) > 1:
            raise ValueError(
                f"frames_per_batch={list(self._frames_of)}: workers are not equal, so there is no "
                "replay of them; leave record_schedule out, or give one number"
            )

    @property
    def num_envs(self) -> int:
        """The environments of all workers."""
        return self.pool.num_envs

    @property
    def frames_per_batch(self) -> int:
        """The frames of one batch, if none are masked."""
        return max(sum(self._frames_of[group]) for group in self._groups)

    @property
    def _group_size(self) -> int:
        """How many workers make a batch together."""
        return self.num_workers if self.shares_batch else 1

    @property
    def _groups(self) -> list[slice]:
        """Which workers make batches together."""
        size = self._group_size
        return [slice(first, first + size) for first in range(0, self.num_workers, size)]

    # -- iteration

    def __iter__(self) -> Iterator[TensorDict]:
        while not self._is_done():
            yield self.next()

    def __len__(self) -> int:
        """The number of batches in all, if no frames are masked."""
        if self.options.total_frames < 0:
            raise TypeError("a collector without total_frames has no length: it never ends")
        return math.ceil(self.options.total_frames / self.frames_per_batch)

    def _is_done(self) -> bool:
        return 0 <= self.options.total_frames <= self.frames

    @ends_on_interrupt
    def next(self) -> Any:
        """The next batch, also after `total_frames`, which only limits iteration and `start`.

        With a `replay_buffer`, the batch is stored there, and None is returned.
        """
        if self.running:
            raise RuntimeError("next() after start(): batches go to the replay buffer")
        return self._next()

    def _next(self) -> Any:
        """The next batch, as the user gets it; None if it went into the replay buffer."""
        self._raise_error()
        if self._chain.schemes:
            self.receive_weights()
        with self._lock:  # the next thread finds the batch both counted and in the buffer
            batch = self._gathered()
            if self.options.replay_buffer is not None:
                self._store(self._finish(batch))
                return None
        return self._finish(batch)

    def _gathered(self) -> TensorDict:
        """The next batch, counted."""
        if self._pauses:
            raise RuntimeError("the collector is paused: leave `with collector.pause()` first")
        began = time.monotonic()
        batch = self._gather()
        if self._chain.schemes and self.options.track_policy_version:
            batch["policy_version"] = self._chain.translate(batch["policy_version"])
        frames = frames_of(batch)
        self.frames += frames
        self.batches += 1
        self._wait_s += time.monotonic() - began
        if not frames and not self.options.reset_when_done:
            raise RuntimeError(
                "all episodes have ended, and reset_when_done=False starts no new ones: "
                "call reset()"
            )
        return batch

    def _batch_of(self, batches: Sequence[WorkerBatch]) -> TensorDict:
        """One batch of these; with copy=False in memory that the next one overwrites."""
        stamps = self.options.track_policy_version
        only_finals = self.options.next_observation == "final"
        buffer = None
        if not self.options.copy:
            layouts = tuple(batch.frames.layout for batch in batches)
            if layouts not in self._buffers:
                self._buffers[layouts] = buffer_for(batches, stamps, only_finals)
            buffer = self._buffers[layouts]
        return assemble(batches, stamps=stamps, only_finals=only_finals, buffer=buffer)

    def _finish(self, batch: TensorDict) -> Any:
        options = self.options
        if options.update_at_each_batch:
            self.update_policy_weights_()
        if options.split_trajs:
            batch = split(batch)
        device = self._storing_device
        if device is not None and device.type != "cpu":
            batch = batch.to(device, non_blocking=True)
            if device.type == "cuda" and not options.no_cuda_sync:
                torch.cuda.current_stream(device).synchronize()
        return batch if options.postproc is None else options.postproc(batch)

    def _store(self, batch: Any) -> None:
        buffer = self.options.replay_buffer
        each = isinstance(batch, TensorDictBase) and batch.batch_dims > 0
        if self.options.extend_buffer or not each:
            buffer.extend(batch)
            return
        for t in range(batch.batch_size[-1]):
            buffer.extend(batch[..., t])

    def _gather(self) -> TensorDict:
        """The next batch: of those workers whose turn it is."""
        taken: list[WorkerBatch] = []
        try:
            for worker in self.turns.next():
                taken.append(self.pool.take(worker))
            newest = [part.newest for part in taken if part.newest is not None]
            self.newest_at_end = max(newest, default=None)
            batch = self._assemble(taken)
        except BaseException:
            for part in taken:
                self.pool.discard(part)
            raise
        finally:
            for part in taken:
                self.pool.release(part)
        self.turns.taken()
        return batch

    def _assemble(self, taken: Sequence[WorkerBatch]) -> TensorDict:
        """One batch of these, copied."""
        if len(taken) > 1:
            workers = [self.pool.handles[part.worker] for part in taken]
            names = [f"{worker.name} {worker.index}" for worker in workers]
            check_alike(names, [part.frames.layout for part in taken], self._apart)
        return self._batch_of(taken)

    # -- weights

    def skip_update(self) -> None:
        """The learner used no frame of the last batch; a simulated update takes no time then."""

    @ends_on_interrupt
    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
    ) -> None:
        """Publish weights as the next version: the given ones, or those of the policy.

        weights_dict: weights by model, for several models. worker_ids: publish only to these.
        """
        sources = [one for one in (policy_or_weights, weights, policy) if one is not None]
        if len(sources) > 1:
            raise ValueError("pass the weights once: as first argument, weights= or policy=")
        self._raise_error()
        by_model = self.publisher.check(weights_dict, model_id, sources[0] if sources else None)
        if self._chain.schemes:
            self._chain.note_published(self.publisher.version + 1)  # before any worker can have it
        self.pool.publish(by_model, worker_ids)

    @property
    def policy_version(self) -> int:
        """The version last published."""
        return self._chain.newest if self._chain.schemes else self.publisher.version

    def get_policy_version(self) -> int:
        """The version last published."""
        return self.policy_version

    def increment_version(self) -> None:
        """Publish the current weights as the next version."""
        self.update_policy_weights_()

    def get_model(self, model_id: str = "policy") -> Any:
        """The model whose weights are published under this name."""
        return find_model(self.publisher.policy, model_id)

    def get_cached_weights(self, model_id: str = "policy") -> Any:
        """The weights that `update_policy_weights_()` would publish now, in the scheme's form."""
        scheme = self.publisher.schemes.get(model_id)
        return None if scheme is None else scheme.weights

    @ends_on_interrupt
    def register_scheme_receiver(self, weight_recv_schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Receive weights from an outer sender, and pass them on to this collector's workers.

        Versions are then counted as by that sender. The sender must have initialised the schemes,
        in another process or, if these are copies, in this one.
        """
        for model_id, scheme in weight_recv_schemes.items():
            self._chain.add(model_id, scheme, self)

    @ends_on_interrupt
    def receive_weights(self, timeout: float | None = None) -> bool:
        """Apply weights that arrived from the outer sender; whether there were any."""
        if timeout is not None and not isinstance(timeout, Real):
            raise TypeError(
                f"receive_weights(timeout={shown(timeout)}): expected seconds; to pass weights, "
                "call update_policy_weights_()"
            )
        return self._chain.receive(timeout)

    # -- collecting in the background

    def start(self) -> None:
        """Collect in the background into the replay buffer, until `shutdown` or `total_frames`."""
        if self.options.replay_buffer is None:
            raise RuntimeError("start() needs a replay buffer: pass replay_buffer=...")
        self._raise_error()
        if self.running:
            raise RuntimeError("the collector is running already")
        self._tell_buffer("begin")
        self._thread = threading.Thread(target=self._run_free, name="lockstep-collect", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether frames are collected in the background."""
        return self._thread is not None and self._thread.is_alive()

    def _run_free(self) -> None:
        try:
            while not self._shut and not self._is_done():
                if self._has_room():
                    self._next()
        except BaseException as error:  # noqa: BLE001 - raised by whatever the user calls next
            if not self._shut:
                self._error = error
                self._tell_buffer("fail", error)
        finally:
            self._tell_buffer("end")

    def _has_room(self) -> bool:
        """Whether the next batch overwrites no frame that a learner still needs; waits a while."""
        await_room = getattr(self.options.replay_buffer, "await_room", None)
        return await_room is None or await_room(ROOM_SLICE_S)

    def _tell_buffer(self, what: str, *args: Any) -> None:
        """Call a method of the replay buffer, if it has that method."""
        if hasattr(self.options.replay_buffer, what):
            getattr(self.options.replay_buffer, what)(*args)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside `with collector.pause():`, no environment is stepped and no batch is in flight."""
        self._raise_if_shut()
        with self._lock:
            self._pauses += 1
            try:
                if self._pauses == 1:
                    self._hold(True)
                yield
            finally:
                self._pauses -= 1
                if not self._pauses and not self._shut:
                    self._hold(False)

    @ends_on_interrupt
    def _hold(self, still: bool) -> None:
        self.pool.pause(still)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        self._raise_if_shut()

    def _raise_if_shut(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this process was forked from process {self._pid}, which owns the collector: "
                "create another collector here"
            )
        if self._shut:
            why = " because a call was interrupted" if self._interrupted else ""
            raise RuntimeError(f"the collector was shut down{why}")

    # -- control

    @ends_on_interrupt
    def counts(self) -> dict[str, Any]:
        """Only the counters of `stats`; cheaper with many workers."""
        self._raise_if_shut()
        return self.pool.counters()

    @ends_on_interrupt
    def stats(self) -> dict[str, Any]:
        """Counters, versions and times; `collected == delivered + dropped + in_flight`."""
        return {
            **self.counts(),
            "batches": self.batches,
            "policy_version": self.policy_version,
            "wait_s": self._wait_s,
            "seed": self.seed,
            "sync": self.publisher.stats(),
        }

    @property
    def seed(self) -> int:
        """The seed that all random streams come from."""
        return self.seeds.seed

    @ends_on_interrupt
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments and policies, and start new episodes; returns the next seed to use.

        static_seed: give this seed to all environments alike.
        """
        self._raise_if_shut()
        self.seeds = replace(self.seeds, seed=check_seed(seed), static=static_seed)
        self.pool.reseed(self.seeds)
        return next_seed(self.seed)

    @ends_on_interrupt
    def reset(self, reset_idx: Any = None) -> None:
        """Start new episodes in all environments, or in some, counted over all workers."""
        self._raise_if_shut()
        self.pool.reset(None if reset_idx is None else as_mask(reset_idx, self.num_envs))

    @ends_on_interrupt
    def getattr_env(self, name: str) -> list[Any]:
        """An attribute of the environments, for each worker."""
        self._raise_if_shut()
        return self.pool.attributes(name)

    def getattr_policy(self, name: str) -> Any:
        """An attribute of the policy, by its path."""
        return operator.attrgetter(name)(self.publisher.policy)

    def getattr_rb(self, name: str) -> Any:
        """An attribute of the replay buffer."""
        if self.options.replay_buffer is None:
            raise AttributeError(f"no attribute {name!r}: this collector has no replay buffer")
        return getattr(self.options.replay_buffer, name)

    def worker_stages(self) -> list[str]:
        """What each worker is doing now: "acting", "idle", "taking weights", ...

        Does not wait. "" for workers that do not report it; empty without worker processes.
        """
        return self.pool.stages()

    def made_batches(self) -> list[BatchSpan]:
        """When the batches were made that arrived since the last call; only the newest."""
        spans = self.pool.made
        return [spans.popleft() for _ in range(len(spans))]

    # -- saving

    @ends_on_interrupt
    def state_dict(self) -> dict[str, Any]:
        """All tensors and numbers that an equal collector needs to continue from here.

        It contains the version of the weights, but not the weights.
        """
        self._raise_error()
        with self._lock:
            return {
                "kind": self.kind,
                "num_workers": self.num_workers,
                "seed": self.seed,
                "frames": self.frames,
                "batches": self.batches,
                "policy_version": self.publisher.version,
                "workers": self.pool.states(),
            }

    @ends_on_interrupt
    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from a saved state; publish the weights first.

        Environments are restored by replaying their episodes, if possible. Returns False if some
        episodes had to start again, or if an attribute of an environment or of the policy is not
        as it was; a warning then names it.
        """
        self._raise_error()
        for name, mine in (("kind", self.kind), ("num_workers", self.num_workers)):
            if state[name] != mine:
                raise ValueError(
                    f"the saved collector has {name}={state[name]!r}, but this one has {mine!r}"
                )
        with self._lock:
            ahead = int(state["policy_version"]) - self.publisher.version
            base = self.publisher.base + ahead
            workers = self.pool.load_states(list(state["workers"]), base)  # may refuse them
            self.seeds = replace(self.seeds, seed=int(state["seed"]))
            self.frames = int(state["frames"])
            # A state of an older version has no number of batches.
            self.batches = int(state.get("batches", self.frames // self.frames_per_batch))
            self.publisher.base = base
            if self._chain.schemes:
                self._chain.note_published(self.publisher.version)
        _warn_of_lost([text for restored in workers for text in restored.lost])
        return all(restored.is_exact for restored in workers)

    # -- ending

    def _close(self, timeout: float, close_env: bool) -> None:
        """End everything."""
        if hasattr(self, "pool"):
            self.pool.close(timeout, close_env=close_env)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End everything within `timeout` seconds. A second call finishes an interrupted one."""
        if self._is_ended or self._pid != os.getpid():  # a forked child has no workers to end
            return
        self._shut, self._cut_short = True, False
        try:
            self._end(5.0 if timeout is None else timeout, close_env, raise_on_error)
        except BaseException as error:
            self._cut_short = not isinstance(error, Exception)
            raise
        if self._error is not None and raise_on_error:
            raise self._error

    @property
    def _is_ended(self) -> bool:
        return self._shut and not self._cut_short

    def _end(self, seconds: float, close_env: bool, raise_on_error: bool) -> None:
        with contextlib.ExitStack() as after:  # in reverse order, even if one of them raises
            if self._threads_before is not None:
                after.callback(torch.set_num_threads, self._threads_before)
            if hasattr(self, "publisher"):
                after.callback(self.publisher.shutdown)
            after.callback(self._chain.shutdown)
            if self._thread is not None and self._thread is not threading.current_thread():
                after.callback(self._thread.join, seconds)
            try:
                self._close(seconds, close_env)
            except Exception:
                if raise_on_error:
                    raise

    def async_shutdown(self, timeout: float | None = None) -> None:
        """End a collector after `start`; raises the error of its background thread, if any."""
        self.shutdown(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.shutdown(raise_on_error=kind is None)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {self.kind} cannot be copied or pickled, because it owns its environments and "
            "workers: create another one"
        )

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_cut_short") and not self._is_ended:
            self.shutdown(timeout=1.0, raise_on_error=False)

    def _warn_of_overshoot(self) -> None:
        total, each = self.options.total_frames, self.frames_per_batch
        if total > 0 and total % each:
            more = math.ceil(total / each) * each
            warnings.warn(
                f"total_frames={total} is not a multiple of the {each} frames of a batch: "
                f"{more} will be collected",
                stacklevel=3,
            )


def as_mask(chosen: Any, num_envs: int) -> np.ndarray[Any, Any]:
    """A mask of the chosen environments, from their numbers or a mask."""
    which, indices = np.zeros(num_envs, bool), np.asarray(chosen)
    which[indices if indices.size else []] = True
    return which


ROOM_SLICE_S = 0.2  # after which a collector that waits for room looks whether it is to end
_OPEN: weakref.WeakSet[BaseCollector] = weakref.WeakSet()


@atexit.register
def _shut_down_the_rest() -> None:
    """Shut down open collectors before multiprocessing waits for their workers at exit."""
    for collector in list(_OPEN):
        collector.shutdown(timeout=1.0, raise_on_error=False)


def _warn_of_lost(lost: Sequence[str]) -> None:
    """Warn of what is not as it was when a collector's state was saved."""
    if names := list(dict.fromkeys(lost)):
        warnings.warn(
            f"the collector does not go on exactly, since its state lacks {', '.join(names[:5])}"
            f"{', …' if len(names) > 5 else ''}",
            stacklevel=4,
        )
