"""A host: a local collector in a process elsewhere, which a trainer calls through an engine.

    trainer (seats.py)                          host's process
    ------------------                          --------------
    open_host(name, job)                  ->    make the collector
                                         <-     hello (environments, address, process)
    connect_host, and scheme.connect()   <->    take version 0, and have its workers take it
    next_batch(serial, versions)          ->    wait for these versions, collect, stamp, pack
                                         <-     a parcel, and the account of all frames so far
    (scheme)                              ->    a thread takes new versions, also in mid-batch, and
                                                publishes them to the collector's own workers
    beat()                                ->    the account; the trainer lives
    control(method, ...)                  ->    what collectors can be told
    close_host()                          ->    end the collector

Every function returns a `Reply`, so that what went wrong comes back as words whatever the engine. A
host that hears nothing for `lease_s` knows its trainer is gone, and ends itself.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import torch

from collectors.options import SINGLE
from collectors.remote.batches import to_entries
from collectors.remote.options import kind_of
from collectors.remote.weight_receiver import NodeReceiver
from collectors.rollout.seeds import Seeds
from collectors.weights.models import POLICY, find_model
from collectors.weights.policy_version import VersionMap
from collectors.workers.process import PASSED_ON, WorkerSpec
from sync import SharedMemWeightSyncScheme, WeightSyncScheme

_HOSTS: dict[str, Node] = {}


@dataclass(frozen=True)
class Reply:
    """How a call ended; `error` is the name of what was raised, `value` then its traceback.

    account: where a host's frames are that could not make its batch.
    """

    value: Any
    error: str | None = None
    frame_counts: dict[str, Any] | None = None


@dataclass
class NodeSpec(WorkerSpec):
    """What a node is told to do.

    leaves: whether the process is the node's own, and ends when the trainer is gone.
    """

    index: int = 0
    num_workers: int = 1
    schemes: Mapping[str, WeightSyncScheme] = field(default_factory=dict)
    version_base: int = 0
    lease_s: float = 60.0
    leaves: bool = True
    as_arrays: bool = False


class Node:
    """One local collector, its weights from above, and its batches in their order."""

    def __init__(self, spec: NodeSpec):
        self.spec = spec
        self.timeout = float(spec.options["timeout"])
        self.stamps = VersionMap()
        self.collector = _make(spec)
        self.collector.set_seed(int(spec.seeds.environments(1)[0]), spec.seeds.static)
        for model_id, scheme in spec.schemes.items():
            model = find_model(self.collector.publisher.policy, model_id)
            scheme.init_on_receiver(
                model_id=model_id, context=self, model=model, worker_idx=spec.index
            )
        self.receiver: NodeReceiver | None = None
        self.heard_at = time.monotonic()
        self._served = threading.Condition()
        self._serial = 1  # of the batch that is made next
        self._making = threading.Lock()  # a batch is of before or after a state was loaded
        self._first = 1  # the batch that is the first after now
        self._accounting = threading.Lock()
        self._accounts = 0
        self._closed = threading.Event()
        self._held: _Hold | None = None
        threading.Thread(target=self._leave_unheard, name="lockstep-lease", daemon=True).start()

    def hello(self) -> dict[str, Any]:
        """Who this is."""
        members = self.collector.stats().get("workers", [])
        described = [member["environment"] for member in members if member.get("environment")]
        environment = (
            described[0] if described else str(getattr(self.collector, "environments", ""))
        )
        return {
            "num_envs": self.collector.num_envs,
            "environment": environment,
            "collector": f"{self.collector.kind} of {len(members)}" if members else SINGLE,
            "node": platform.node(),
            "pid": os.getpid(),
        }

    # -- weights

    def connect(self) -> None:
        """Take the first version of every model into use, here and in the collector's workers."""
        schemes = dict(self.spec.schemes)
        for scheme in schemes.values():
            scheme.connect(background=False)
        if schemes:
            self.receiver = NodeReceiver(schemes, self.spec.version_base)

    def update_policy_weights_(self, weights: Any = None, *, model_id: str | None = None) -> None:
        """Called by the schemes of this host: pass on what arrived, stamped as the trainer does."""
        schemes = self.spec.schemes
        main = POLICY if POLICY in schemes else next(iter(schemes))
        if model_id == main:  # noted before any worker can have it
            version = schemes[main].version + self.spec.version_base
            self.stamps.note(self.collector.publisher.version + 1, version)
        self.collector.update_policy_weights_(weights, model_id=model_id)

    # -- batches

    def next(
        self, serial: int, versions: Mapping[str, int]
    ) -> tuple[dict[Any, Any], dict[str, Any]]:
        """The batch of this number, with weights no older than `versions`, and the account."""
        with self._served:
            while self._serial != serial:
                self._served.wait(1.0)
                self._raise_if_closed()
        try:
            if self.receiver is None and self.spec.schemes:
                raise RuntimeError("no weights were handed over to this host yet")
            if self.receiver is not None:
                self.receiver.await_versions(versions, self.timeout)
            with self._making:
                batch = self.collector.next()
                batch["policy_version"] = self.stamps.translate(batch["policy_version"])
                self._first = serial + 1
            return to_entries(batch, as_arrays=self.spec.as_arrays), self.frame_counts()
        finally:
            with self._served:
                self._serial += 1
                self._served.notify_all()

    def frame_counts(self) -> dict[str, Any]:
        """Where every frame is that this host made, and what its workers do."""
        names = ("collected", "delivered", "dropped", "in_flight", "restarts", "preempted")
        with self._accounting:  # so that a later number is a later state
            stats = self.collector.stats()
            self._accounts += 1
            number = self._accounts
        return {
            **{name: stats[name] for name in names},
            "number": number,
            "version": self.stamps.newest,
            "workers": stats.get("workers", []),
        }

    # -- control

    def control(self, method: str, args: tuple[Any, ...]) -> Any:
        """Do one of the things that a trainer may ask for."""
        return getattr(self, f"do_{method}")(*args)

    def do_getattr_env(self, name: str) -> list[Any]:
        return self.collector.getattr_env(name)

    def do_set_seed(self, seeds: Seeds) -> None:
        self.spec.seeds = seeds
        self.collector.set_seed(int(seeds.environments(1)[0]), seeds.static)

    def do_reset(self, which: list[int] | None) -> None:
        self.collector.reset(None if which is None else np.array(which, np.int64))

    def do_state_dict(self) -> dict[str, Any]:
        return {
            "seeds": asdict(self.spec.seeds),
            "collector": self.collector.state_dict(),
            "stamps": self.stamps.state_dict(),
        }

    def do_load_state_dict(
        self, state: dict[str, Any], base: int, goes_on: bool
    ) -> tuple[bool, int]:
        """Go on from there; whether to the bit, and which batch will be the first after it."""
        with self._making:
            exact: bool = self.collector.load_state_dict(state["collector"])
            self.spec.version_base, self.spec.seeds = base, Seeds(**state["seeds"])
            self.stamps.load_state_dict(state["stamps"])
            if self.receiver is not None:
                self.receiver.rebase(base)
                self.stamps.note(self.collector.publisher.version, self.receiver.version)
            if not goes_on:
                self.collector.reset()
            return exact and goes_on, self._first

    def do_hold(self, still: bool) -> None:
        """Have the collector rest, or go on."""
        before = self._held
        if still == (before is not None):
            return
        self._held = hold = _Hold(self.collector, self._closed) if still else None
        if hold is not None and not hold.entered.wait(self.timeout):
            raise TimeoutError(f"the workers did not come to rest within {self.timeout:g} s")
        if before is not None:
            before.release.set()
            before.join(self.timeout)

    # -- ending

    def close(self, timeout: float = 5.0, close_env: bool = True) -> None:
        """End the collector, and with it whatever waits here."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(Exception):
            self.do_hold(False)
        if self.receiver is not None:
            self.receiver.close()
        self.collector.shutdown(timeout=timeout, close_env=close_env, raise_on_error=False)

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the host was closed")

    def _leave_unheard(self) -> None:
        lease_s = self.spec.lease_s
        while not self._closed.wait(min(1.0, lease_s / 4)):
            if time.monotonic() - self.heard_at > lease_s:
                if self.spec.leaves:
                    leave()
                self.close(1.0)


class _Hold(threading.Thread):
    """A host's collector at rest, from `entered` to `release` or the host's end."""

    def __init__(self, collector: Any, ended: threading.Event):
        super().__init__(name="lockstep-hold", daemon=True)
        self._collector, self._ended = collector, ended
        self.entered, self.release = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._collector.pause():
            self.entered.set()
            while not self.release.wait(1.0) and not self._ended.is_set():
                pass


def _make(spec: NodeSpec) -> Any:
    """The collector that the spec describes."""
    assert spec.collector_class is not None
    torch.set_num_threads(spec.num_threads)
    options = spec.options
    told = getattr(spec.collector_class, "keywords", {})
    passed = {name: options[name] for name in PASSED_ON if name not in told}
    acts_randomly = spec.policy is None and spec.policy_factory is None
    given: dict[str, Any] = {"create_env_kwargs": spec.create_env_kwargs}
    if kind_of(spec.collector_class) != SINGLE:
        given |= {"num_workers": spec.num_workers, "num_sub_threads": spec.num_threads}
        given |= {"start_timeout": options["start_timeout"]}
        given["on_worker_failure"] = options["on_worker_failure"]
        if options["on_worker_failure"] == "restart":
            given["max_restarts"] = options["max_restarts"]
    # A worker that takes weights only before a batch is not to be waited for in the middle of one.
    waits = options["apply_at"] == "step"
    schemes = {
        model_id: SharedMemWeightSyncScheme(
            scheme.strategy, sync=waits, timeout=options["timeout"], check_finite=False
        )
        for model_id, scheme in spec.schemes.items()
    }
    return spec.collector_class(
        spec.create_env_fn,
        spec.policy,
        policy_factory=spec.policy_factory,
        frames_per_batch=spec.frames,
        seed=int(spec.seeds.environments(1)[0]),
        policy_device=None if acts_randomly else spec.policy_device,
        init_random_frames=options["random_frames"],
        weight_sync_schemes=schemes or None,
        copy=True,
        **given,
        **passed,
    )


def leave() -> None:
    """End this process at once: the trainer is gone, and nobody is left to be told anything."""
    os._exit(1)


# -- what the trainer calls, by name


def open_node(name: str, spec: bytes) -> Reply:
    """Make a host; one of the same name before it is ended."""
    with _answering() as answer:
        _close(name)
        host = _HOSTS[name] = Node(cloudpickle.loads(spec))
        answer.value = host.hello()
    return answer.reply()


def connect_node(name: str) -> Reply:
    """Have it meet the trainer's schemes."""
    with _answering() as answer:
        _host(name).connect()
    return answer.reply()


def next_batch(name: str, serial: int, versions: Mapping[str, int]) -> Reply:
    """Its batch of this number."""
    with _answering() as answer:
        answer.value = _host(name).next(serial, versions)
    if answer.error is not None and name in _HOSTS:
        with contextlib.suppress(Exception):  # its collector may be beyond that
            answer.frame_counts = _host(name).frame_counts()
    return answer.reply()


def beat(name: str) -> Reply:
    """Its account; and a sign that the trainer lives."""
    with _answering() as answer:
        answer.value = _host(name).frame_counts()
    return answer.reply()


def control(name: str, method: str, args: bytes) -> Reply:
    """Something that it is told, or asked; arguments and answer are pickled."""
    with _answering() as answer:
        answer.value = cloudpickle.dumps(_host(name).control(method, cloudpickle.loads(args)))
    return answer.reply()


def close_node(name: str, timeout: float, close_env: bool) -> Reply:
    """End it."""
    with _answering() as answer:
        _close(name, timeout, close_env)
    return answer.reply()


def close_all() -> None:
    """End all hosts of this process."""
    for name in list(_HOSTS):
        _close(name, 1.0)


class _Answer:
    """What a call comes to."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: str | None = None
        self.frame_counts: dict[str, Any] | None = None

    def reply(self) -> Reply:
        return Reply(self.value, self.error, self.frame_counts)


@contextlib.contextmanager
def _answering() -> Iterator[_Answer]:
    answer = _Answer()
    try:
        yield answer
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        answer.error, answer.value = type(error).__name__, traceback.format_exc().rstrip()


def _host(name: str) -> Node:
    host = _HOSTS.get(name)
    if host is None:
        raise RuntimeError(f"there is no host {name!r} in this process (pid {os.getpid()})")
    host.heard_at = time.monotonic()
    return host


def _close(name: str, timeout: float = 5.0, close_env: bool = True) -> None:
    host = _HOSTS.pop(name, None)
    if host is not None:
        host.close(timeout, close_env)
