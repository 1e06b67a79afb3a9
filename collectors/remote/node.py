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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import torch

from collectors.options import SINGLE
from collectors.remote.options import kind_of
from collectors.remote.packed_batch import PackedBatch, pack
from collectors.remote.weight_receiver import NodeReceiver
from collectors.rollout.seeds import Seeds
from collectors.weights.models import POLICY, find_model
from collectors.weights.policy_version import VersionMap
from collectors.workers.process import PASSED_ON, packed
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
class NodeJob:
    """What a host is told to do."""

    host: int
    create_env_fn: Any  # or a list, one for each of its workers
    create_env_kwargs: Any
    policy: Any
    policy_factory: Callable[[], Any] | None
    collector_class: Callable[..., Any]
    num_workers: int
    frames: int
    seeds: Seeds
    policy_device: torch.device | None
    num_threads: int
    schemes: Mapping[str, WeightSyncScheme]
    version_base: int
    lease_s: float
    leaves: bool  # whether the process is the host's own, and ends with a trainer that is gone
    as_array: bool
    options: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        return packed(self)


class Node:
    """One local collector, its weights from above, and its batches in their order."""

    def __init__(self, job: NodeJob):
        self.job = job
        self.timeout = float(job.options["timeout"])
        self.stamps = VersionMap()
        self.collector = _make(job)
        self.collector.set_seed(int(job.seeds.environments(1)[0]), job.seeds.static)
        for model_id, scheme in job.schemes.items():
            model = find_model(self.collector.publisher.policy, model_id)
            scheme.init_on_receiver(
                model_id=model_id, context=self, model=model, worker_idx=job.host
            )
        self.receiver: NodeReceiver | None = None
        self.heard_at = time.monotonic()
        self._served = threading.Condition()
        self._serial = 0
        self._making = threading.Lock()  # a batch is of before or after a state was loaded
        self._made = 0  # batches
        self._accounting = threading.Lock()
        self._accounts = 0
        self._closed = threading.Event()
        self._held: _Hold | None = None
        self._holds = 0
        self._holding = threading.Lock()
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
        schemes = dict(self.job.schemes)
        for scheme in schemes.values():
            scheme.connect(background=False)
        if schemes:
            self.receiver = NodeReceiver(schemes, self.job.version_base)

    def update_policy_weights_(self, weights: Any = None, *, model_id: str | None = None) -> None:
        """Called by the schemes of this host: pass on what arrived, stamped as the trainer does."""
        schemes = self.job.schemes
        main = POLICY if POLICY in schemes else next(iter(schemes))
        if model_id == main:  # noted before any worker can have it
            version = schemes[main].version + self.job.version_base
            self.stamps.note(self.collector.publisher.version + 1, version)
        self.collector.update_policy_weights_(weights, model_id=model_id)

    # -- batches

    def next(self, serial: int, versions: Mapping[str, int]) -> tuple[PackedBatch, dict[str, Any]]:
        """The batch of this number, with weights no older than `versions`, and the account."""
        with self._served:
            while self._serial != serial:
                self._served.wait(1.0)
                self._raise_if_closed()
        try:
            if self.receiver is None and self.job.schemes:
                raise RuntimeError("no weights were handed over to this host yet")
            if self.receiver is not None:
                self.receiver.await_versions(versions, self.timeout)
            with self._making:
                batch = self.collector.next()
                batch["policy_version"] = self.stamps.translate(batch["policy_version"])
                self._made = serial + 1
            return pack(batch, as_array=self.job.as_array), self.frame_counts()
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
        self.job.seeds = seeds
        self.collector.set_seed(int(seeds.environments(1)[0]), seeds.static)

    def do_reset(self, which: list[int] | None) -> None:
        self.collector.reset(None if which is None else np.array(which, np.int64))

    def do_state_dict(self) -> dict[str, Any]:
        return {
            "seeds": asdict(self.job.seeds),
            "collector": self.collector.state_dict(),
            "stamps": self.stamps.state_dict(),
        }

    def do_load_state_dict(
        self, state: dict[str, Any], base: int, goes_on: bool
    ) -> tuple[bool, int]:
        """Go on from there; whether to the bit, and which batch will be the first after it."""
        with self._making:
            exact: bool = self.collector.load_state_dict(state["collector"])
            self.job.version_base, self.job.seeds = base, Seeds(**state["seeds"])
            self.stamps.load_state_dict(state["stamps"])
            if self.receiver is not None:
                self.receiver.rebase(base)
                self.stamps.note(self.collector.publisher.version, self.receiver.version)
            if not goes_on:
                self.collector.reset()
            return exact and goes_on, self._made

    def do_hold(self, still: bool, number: int) -> None:
        """Have the collector rest, or go on, as was said last: calls may overtake each other."""
        with self._holding:
            if number < self._holds:
                return
            self._holds, before = number, self._held
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
            self.do_hold(False, self._holds)
        if self.receiver is not None:
            self.receiver.close()
        self.collector.shutdown(timeout=timeout, close_env=close_env, raise_on_error=False)

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the host was closed")

    def _leave_unheard(self) -> None:
        lease_s = self.job.lease_s
        while not self._closed.wait(min(1.0, lease_s / 4)):
            if time.monotonic() - self.heard_at > lease_s:
                if self.job.leaves:
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


def _make(job: NodeJob) -> Any:
    """The collector that the job describes."""
    torch.set_num_threads(job.num_threads)
    options = job.options
    told = getattr(job.collector_class, "keywords", {})
    passed = {name: options[name] for name in PASSED_ON if name not in told}
    acts_randomly = job.policy is None and job.policy_factory is None
    given: dict[str, Any] = {"create_env_kwargs": job.create_env_kwargs}
    if kind_of(job.collector_class) != SINGLE:
        given |= {"num_workers": job.num_workers, "num_sub_threads": job.num_threads}
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
        for model_id, scheme in job.schemes.items()
    }
    return job.collector_class(
        job.create_env_fn,
        job.policy,
        policy_factory=job.policy_factory,
        frames_per_batch=job.frames,
        seed=int(job.seeds.environments(1)[0]),
        policy_device=None if acts_randomly else job.policy_device,
        init_random_frames=options["random_frames"],
        weight_sync_schemes=schemes or None,
        copy=False,
        **given,
        **passed,
    )


def leave() -> None:
    """End this process at once: the trainer is gone, and nobody is left to be told anything."""
    os._exit(1)


# -- what the trainer calls, by name


def open_node(name: str, job: bytes) -> Reply:
    """Make a host; one of the same name before it is ended."""
    with _answering() as answer:
        _close(name)
        host = _HOSTS[name] = Node(cloudpickle.loads(job))
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
