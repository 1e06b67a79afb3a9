"""A node: a local collector in a remote process, which a trainer calls through an engine.

    trainer (node_handle.py)                   node's process
    -------------------------                   --------------
    open_node(name, spec)                 ->    make the collector
                                         <-     hello (environments, machine, process)
    call_node(name, method, ...)
      "connect", and scheme.connect()    <->    take version 0, and have its workers take it
      "next_batch"                        ->    wait for weights, collect, stamp
                                         <-     a batch, and the counts of all frames so far
      (scheme)                            ->    a thread takes new versions, also in mid-batch, and
                                                publishes them to the collector's own workers
      "frame_counts"                      ->
                                         <-     the counts
      "control"                           ->    call a `do_...` method
      "close"                             ->    end the collector

Calls return a `Reply`, so that errors travel as text over any engine. The engine ends the process
when the trainer is gone.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from collectors.options import SINGLE
from collectors.remote.batches import to_entries
from collectors.remote.options import kind_of
from collectors.remote.weight_receiver import NodeReceiver
from collectors.rollout.environment import Restored
from collectors.rollout.policy import shift_worker
from collectors.rollout.seeds import Seeds
from collectors.single import Collector
from collectors.weights.models import POLICY, find_model
from collectors.weights.version_map import VersionMap
from collectors.workers.handle import FRAME_COUNTS
from collectors.workers.worker_spec import PASSED_ON, WorkerSpec
from sync import SharedMemWeightSyncScheme, WeightSyncScheme

_NODES: dict[str, Node] = {}  # of this process


class Reply(NamedTuple):
    """How a call ended. After an error, `value` is the traceback and `error` the error's class."""

    value: Any
    error: str | None = None
    frame_counts: dict[str, Any] | None = None  # after an error, if they can be had


@dataclass
class NodeSpec(WorkerSpec):
    """The specification of a node."""

    index: int = 0
    collector_class: Callable[..., Any] | None = None
    num_workers: int = 1
    schemes: Mapping[str, WeightSyncScheme] = field(default_factory=dict)
    version_base: int = 0
    as_arrays: bool = False  # batches travel as NumPy arrays


class Node:
    """One local collector, which takes weights from the trainer and makes its batches in order."""

    def __init__(self, name: str, spec: NodeSpec):
        self.name = name
        self.spec = spec
        self.timeout = float(spec.options["timeout"])
        self.stamps = VersionMap()
        self.collector = _make_collector(spec)
        for model_id, scheme in spec.schemes.items():
            model = find_model(self.collector.publisher.policy, model_id)
            scheme.init_on_receiver(
                model_id=model_id, context=self, model=model, worker_idx=spec.index
            )
        self.receiver: NodeReceiver | None = None
        self._collecting = threading.Lock()  # no state is loaded during a batch
        self._serial = 0  # of the last batch
        self._counting = threading.Lock()
        self._num_counts = 0
        self._pause: _Pause | None = None
        _NODES[name] = self

    def hello(self) -> dict[str, Any]:
        """What the trainer says about this node in errors."""
        collector = self.collector
        workers = collector.stats().get("workers")
        if workers is None:
            described = f"{SINGLE}, {collector.environments}"
        else:
            environments = [worker["environment"] for worker in workers]
            described = f"{collector.kind} of {len(workers)}, {environments[0]}"
        return {
            "num_envs": collector.num_envs,
            "environment": described,
            "machine": platform.node(),
            "pid": os.getpid(),
        }

    # -- weights

    def connect(self) -> None:
        """Use the first version of every model, here and in the collector's workers."""
        for scheme in self.spec.schemes.values():
            scheme.connect(background=False)
        if self.spec.schemes:
            self.receiver = NodeReceiver(self.spec.schemes, self.spec.version_base)

    def update_policy_weights_(self, weights: Any = None, *, model_id: str | None = None) -> None:
        """Called by the node's schemes: publish what arrived to the collector's workers."""
        schemes = self.spec.schemes
        main = POLICY if POLICY in schemes else next(iter(schemes))
        if model_id == main:  # noted before any worker can have it
            version = schemes[main].version + self.spec.version_base
            self.stamps.note(self.collector.publisher.version + 1, version)
        self.collector.update_policy_weights_(weights, model_id=model_id)

    # -- batches

    def next_batch(self, versions: Mapping[str, int]) -> tuple[int, dict[Any, Any], Any, Any]:
        """A batch with weights no older than `versions`.

        Returns its number, itself, the versions of all its steps if it is of one worker, and the
        counts of frames.
        """
        if self.receiver is not None:
            self.receiver.await_versions(versions, self.timeout)
        elif self.spec.schemes:
            raise RuntimeError("no weights were handed over to this node yet")
        with self._collecting:
            batch = self.collector.next()
            batch["policy_version"] = self.stamps.translate(batch["policy_version"])
            stamps = None
            if isinstance(self.collector, Collector):
                stamps = self.stamps.translate(self.collector.last_stamps()).numpy()
            self._serial += 1
            serial = self._serial
        entries = to_entries(batch, as_arrays=self.spec.as_arrays)
        return serial, entries, stamps, self.frame_counts()

    def frame_counts(self) -> dict[str, Any]:
        """Where every frame of this node is, and what its workers do."""
        with self._counting:  # so that a higher number is a later state
            stats = self.collector.stats()
            self._num_counts += 1
            number = self._num_counts
        return {
            **{name: stats[name] for name in FRAME_COUNTS},
            "number": number,
            "version": self.stamps.newest,
            "workers": stats.get("workers", []),
        }

    # -- control

    def control(self, method: str, args: bytes) -> bytes:
        """Call one of the methods below; arguments and result are pickled."""
        function = getattr(self, f"do_{method}")
        result: bytes = cloudpickle.dumps(function(*cloudpickle.loads(args)))
        return result

    def do_getattr_env(self, name: str) -> list[Any]:
        return self.collector.getattr_env(name)

    def do_set_seed(self, seeds: Seeds) -> None:
        self.spec.seeds = seeds
        self.collector.set_seed(seeds.seed, seeds.static)

    def do_reset(self, which: np.ndarray[Any, Any] | None) -> None:
        self.collector.reset(which)

    def do_state_dict(self) -> dict[str, Any]:
        return {
            "seeds": asdict(self.spec.seeds),
            "collector": self.collector.state_dict(),
            "stamps": self.stamps.state_dict(),
        }

    def do_load_state_dict(
        self, state: dict[str, Any], base: int, goes_on: bool
    ) -> tuple[Restored, int]:
        """Continue from there; how far, and the number of the first batch after it."""
        with self._collecting:
            exact: bool = self.collector.load_state_dict(state["collector"])
            self.spec.version_base, self.spec.seeds = base, Seeds(**state["seeds"])
            self.stamps.load_state_dict(state["stamps"])
            if self.receiver is not None:
                self.receiver.rebase(base)
                self.stamps.note(self.collector.publisher.version, self.receiver.version)
            if not goes_on:
                self.collector.reset()
            return Restored(exact and goes_on, []), self._serial + 1

    def do_hold(self, still: bool) -> None:
        """Pause the collector, or let it continue."""
        if still and self._pause is None:
            self._pause = _Pause(self.collector)
            if not self._pause.entered.wait(self.timeout):
                raise TimeoutError(f"the workers did not pause within {self.timeout:g} s")
        elif not still and self._pause is not None:
            pause, self._pause = self._pause, None
            pause.over.set()
            pause.join(self.timeout)

    # -- ending

    def close(self, timeout: float, close_env: bool = True) -> None:
        """End the collector, and every call that waits."""
        _NODES.pop(self.name, None)
        self.do_hold(False)
        if self.receiver is not None:
            self.receiver.close()
        self.collector.shutdown(timeout=timeout, close_env=close_env, raise_on_error=False)


class _Pause(threading.Thread):
    """A collector's pause, from `entered` to `over`: one thread must begin and end it."""

    def __init__(self, collector: Any):
        super().__init__(name="lockstep-pause", daemon=True)
        self._collector = collector
        self.entered, self.over = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._collector.pause():
            self.entered.set()
            self.over.wait()


def _make_policy(factory: Callable[[], Any], first_worker: int) -> Any:
    """What a policy factory makes for a node whose first worker has this index."""
    policy = factory()
    shift_worker(policy, first_worker)
    return policy


def _make_collector(spec: NodeSpec) -> Any:
    """The collector that the spec describes."""
    assert spec.collector_class is not None
    torch.set_num_threads(spec.num_threads)
    first_worker, factory = spec.index * spec.num_workers, spec.policy_factory
    shift_worker(spec.policy, first_worker)
    if factory is not None:
        factory = partial(_make_policy, factory, first_worker)
    options, workers = spec.options, {}
    names: tuple[str, ...] = PASSED_ON
    if kind_of(spec.collector_class) != SINGLE:
        names = (*names, "start_timeout", "on_worker_failure", "max_restarts")
        workers = {"num_workers": spec.num_workers, "num_sub_threads": spec.num_threads}
    own = getattr(spec.collector_class, "keywords", {})  # of a partial
    passed = {name: options[name] for name in names if name not in own}
    acts_randomly = spec.policy is None and spec.policy_factory is None
    schemes = {
        model_id: SharedMemWeightSyncScheme(
            scheme.strategy,
            # Workers that apply weights only between batches are not waited for.
            sync=options["apply_at"] == "step",
            timeout=options["timeout"],
            check_finite=False,
            verify=scheme.verify,
        )
        for model_id, scheme in spec.schemes.items()
    }
    return spec.collector_class(
        spec.create_env_fn,
        spec.policy,
        policy_factory=factory,
        create_env_kwargs=spec.create_env_kwargs,
        frames_per_batch=spec.frames,
        seed=_seeds(spec),
        policy_device=None if acts_randomly else spec.policy_device,
        init_random_frames=options["random_frames"],
        weight_sync_schemes=schemes or None,
        copy=True,
        **workers,
        **passed,
    )


def _seeds(spec: NodeSpec) -> Seeds:
    """The random streams of the node's first worker: each worker has those it would have alone."""
    if spec.num_workers == 1:
        return spec.seeds
    generations = 1 + spec.options["max_restarts"]  # workers of this node may be replaced, too
    return replace(spec.seeds, generation=spec.seeds.generation * generations)


# -- what the trainer calls


def open_node(name: str, spec: bytes) -> Reply:
    """Make a node; what it says about itself."""
    return _reply(name, lambda: Node(name, cloudpickle.loads(spec)).hello())


def call_node(name: str, method: str, *args: Any) -> Reply:
    """Call a method of a node."""

    def call() -> Any:
        if name not in _NODES:
            raise RuntimeError(f"there is no node {name!r} in this process (pid {os.getpid()})")
        return getattr(_NODES[name], method)(*args)

    return _reply(name, call)


def close_all() -> None:
    """End all nodes of this process."""
    for node in list(_NODES.values()):
        node.close(1.0)


def _reply(name: str, call: Callable[[], Any]) -> Reply:
    try:
        return Reply(call())
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        text, counts = traceback.format_exc().rstrip(), None
        with contextlib.suppress(Exception):  # the node may be missing or broken
            counts = _NODES[name].frame_counts()
        return Reply(text, type(error).__name__, counts)
