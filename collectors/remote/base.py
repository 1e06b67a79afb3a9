"""Collectors on other machines, gathered into one: what the three ways there have in common."""

from __future__ import annotations

import copy
import functools
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from collectors.base import BaseCollector, as_mask
from collectors.options import NO_POLICY, check_graphs, per_worker, share_frames
from collectors.remote.launcher import Launcher
from collectors.remote.node import NodeJob
from collectors.remote.node_handle import Full, NodeHandle
from collectors.remote.node_pool import NodePool
from collectors.remote.options import RemoteArguments, RemoteOptions, places, share, taken
from collectors.remote.packed_batch import nest, stack
from collectors.rollout.seeds import Seeds, check_seed, next_seed
from collectors.rollout.spaces import Key
from collectors.signatures import takes
from collectors.weights.models import POLICY, sends_weights
from collectors.weights.publisher import Publisher
from collectors.workers import interrupts
from collectors.workers.process import PASSED_ON
from sync import WeightSyncScheme
from sync.errors import WorkerDied, WorkerError, WorkerTimeout, combine

AHEAD = 2  # batches that a host of an asynchronous collector makes before it waits
LEASE_S = 60.0


class RemoteCollector(BaseCollector):
    """Hosts elsewhere, each a local collector, make batches together (sync) or each on its own.

    `worker_ids`, `stats()["workers"]`, errors and a frame's ("collector", "worker") all count
    collectors; environments are counted over all of them. `num_collectors`,
    `num_workers_per_collector`, `sync`, `collector_class` and `max_collectors` are explained in
    `remote/options.py`, all other options in `collectors/options.py`.
    """

    _room = 1  # places for so many times the collectors that there are at first
    seats: NodePool | None = None
    launcher: Launcher | None = None

    @takes(RemoteArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        self.remote = remote = taken(RemoteOptions, options)
        n = remote.num_collectors
        if n is None:
            n = self._count(create_env_fn, remote.num_workers_per_collector)
        self._per_host = remote.num_workers_per_collector
        self.sync = remote.sync
        self._recovering = threading.RLock()
        self.capacity = remote.max_collectors or n * self._room
        if self.capacity < n:
            raise ValueError(f"max_collectors={self.capacity}: there are {n} at first")
        factories = share(create_env_fn, n, self._per_host, "create_env_fn")
        self._env_kwargs = share(
            options.pop("create_env_kwargs", None), n, self._per_host, "create_env_kwargs"
        )
        device = options.pop("policy_device", None)
        if device is not None and policy is None and options.get("policy_factory") is None:
            raise ValueError(f"policy_device: {NO_POLICY}")
        named = "device" if device is None else "policy_device"
        device = options.get("device") if device is None else device
        self.policy_devices = places(device, n, named)
        if options.get("cudagraph_policy"):
            check_graphs(self.policy_devices)
        for name in ("num_workers", "start_method", "cat_results", "preemptive_threshold"):
            if options.get(name) is not None:
                raise ValueError(_REFUSED[name].format(kind=self.kind, value=options[name]))
        if options.get("copy") is False:
            raise ValueError("copy=False hands out views of memory that other machines do not have")
        super().__init__(factories, policy, num_workers=n, **options)

    @staticmethod
    def _count(create_env_fn: Any, num_workers: int) -> int:
        if isinstance(create_env_fn, Sequence) and create_env_fn:
            nested = any(isinstance(one, Sequence) for one in create_env_fn)
            return len(create_env_fn) if nested else -(-len(create_env_fn) // num_workers)
        return 1

    # -- what a way there defines

    @property
    @abstractmethod
    def _scheme_class(self) -> type[WeightSyncScheme]:
        """The scheme that travels this way."""

    @abstractmethod
    def _launch(self, num_hosts: int) -> Launcher:
        """Start the hosts' processes, or find them."""

    # -- opening

    def _make_publisher(self) -> Publisher:
        options, n = self.options, self.num_workers
        self._frames_of = share_frames(options.frames_per_batch, n, each=not self.sync)
        for frames in self._frames_of:
            if frames % self._per_host and self.remote.collector_class is None:
                share_frames(frames, self._per_host, each=False)
        self._factories = per_worker(options.policy_factory, n, "policy_factory")
        schemes = self._given_schemes()
        source = self._source()
        spare = [None] * (self.capacity - n)
        self.launcher = self._launch(n)
        return Publisher(
            source,
            self._attached(source, schemes),
            devices=[*self.policy_devices, *spare],
            updater=options.weight_updater,
        )

    def _given_schemes(self) -> Any:
        """The schemes that were given, or the updater's; None if there is neither."""
        schemes, name = self.options.weight_sync_schemes, "weight_sync_schemes"
        updater = self.options.weight_updater
        if (scheme := getattr(updater, "scheme", None)) is not None:
            schemes, name = {POLICY: scheme}, f"weight_updater={type(updater).__name__}"
        for model_id, scheme in (schemes or {}).items():
            if not isinstance(scheme, self._scheme_class):
                raise ValueError(
                    f"{name}: {model_id!r} has a {type(scheme).__name__}; "
                    f"{self.kind} takes {self._scheme_class.__name__}"
                )
            if updater is not None and scheme.initialized_on_sender:
                raise ValueError(
                    f"{name} has workers already, and {self.kind} makes its own: leave "
                    "remote_collectors out"
                )
        return schemes

    def _attached(self, source: Any, schemes: Any) -> Any:
        """The schemes, on this collector's engine."""
        if schemes is None and sends_weights(source, schemes):
            schemes = {POLICY: self._scheme_class()}
        for scheme in (schemes or {}).values():
            scheme.attach(self.launcher.engine)  # type: ignore[union-attr]
        return schemes or {}

    def _open(self) -> None:
        options = self.options
        assert self.launcher is not None
        self.seats = NodePool(
            self.launcher,
            self.publisher,
            capacity=self.capacity,
            timeout=options.timeout,
            start_timeout=options.start_timeout,
        )
        self._hosted_policy = _portable(self.policy)
        self.seats.open([self._job(host) for host in range(self.num_workers)])
        if options.weight_updater is not None:
            options.weight_updater.register_collector(self)

    def _job(self, host: int, like: int | None = None) -> NodeJob:
        """What a host is told; one that was added is told what host `like` was."""
        options, n = self.options, len(self._frames_of)
        place = host if like is None else like
        assert self.launcher is not None
        kwargs = self._env_kwargs[place] if isinstance(self._env_kwargs, list) else self._env_kwargs
        env_fns = self.create_env_fn
        factory = self._factories[place]
        shared = {name: getattr(options, name) for name in (*PASSED_ON, "start_timeout")}
        shared |= {name: getattr(options, name) for name in ("on_worker_failure", "max_restarts")}
        return NodeJob(
            host=host,
            create_env_fn=env_fns[place] if isinstance(env_fns, list) else env_fns,
            create_env_kwargs=kwargs,
            policy=None if factory is not None else self._hosted_policy,
            policy_factory=factory,
            collector_class=self.remote.hosted(),
            num_workers=self._per_host,
            frames=self._frames_of[place],
            seeds=Seeds(self.seed, host),
            policy_device=self.policy_devices[place],
            num_threads=options.num_sub_threads,
            schemes=self.publisher.schemes,
            version_base=self.publisher.base,
            lease_s=max(LEASE_S, options.timeout),
            leaves=self.launcher.own_process,
            as_array=self.launcher.as_array,
            options={**shared, "random_frames": math.ceil(options.init_random_frames / n)},
        )

    @property
    def hosts(self) -> list[NodeHandle]:
        """The hosts, in their order."""
        return self.seats.seats if self.seats is not None else []

    @property
    def num_envs(self) -> int:
        """The environments of all collectors."""
        return sum(seat.num_envs for seat in self.hosts)

    @property
    def frames_per_batch(self) -> int:
        jobs = self.seats.jobs if self.seats is not None else {}
        frames = [jobs[seat.host].frames for seat in self.hosts] or self._frames_of
        return sum(frames) if self.sync else max(frames)

    # -- batches

    def _gather(self) -> TensorDict:
        assert self.seats is not None
        return self._gather_all() if self.sync else self._gather_first()

    def _gather_all(self) -> TensorDict:
        seats = self.seats
        assert seats is not None

        def all_are_here() -> bool:
            return all(seat.full for seat in seats.seats)

        with interrupts.let_in():
            while not all_are_here() or seats.failed():
                with self._recovering:
                    self._see_to_failures()
                    for seat in seats.seats:
                        if not seat.full and not seat.owed:
                            seats.order(seat)
                seats.wait(lambda: bool(all_are_here() or seats.failed()))
                self._raise_error()
        parts = [self._entries(seat, seats.take(seat)) for seat in seats.seats]
        seats.arrived.clear()
        _check_alike(parts, seats.seats)
        return stack(parts)

    def _gather_first(self) -> TensorDict:
        seats = self.seats
        assert seats is not None
        with interrupts.let_in():
            while True:
                with self._recovering:
                    self._see_to_failures()
                    for seat in seats.seats:
                        while seat.owed + len(seat.full) < AHEAD:
                            seats.order(seat)
                if seats.arrived:
                    break
                seats.wait(lambda: bool(seats.arrived or seats.failed()))
                self._raise_error()
        seat, full = seats.take_first()
        with self._recovering:
            if seat in seats.seats and seat.failure is None:
                seats.order(seat)
        return nest(self._entries(seat, full))

    def _entries(self, seat: NodeHandle, full: Full) -> dict[Key, Any]:
        """What a host handed over, with the numbers that hold over all hosts."""
        entries = dict(full.entries)
        if full.generation != seat.numbered:
            seat.trajectories.restart()
            seat.numbered = full.generation
        mask = entries["collector", "mask"]
        ids = seat.trajectories.adopt(entries["collector", "traj_ids"].numpy())
        entries["collector", "traj_ids"] = torch.from_numpy(ids).masked_fill(~mask, 0)
        entries["collector", "worker"].fill_(seat.host)
        entries["collector", "env"].add_(seat.first_env)
        if self.tracked is None:
            del entries[("policy_version",)]
        return entries

    # -- failures

    def _see_to_failures(self) -> None:
        """Replace failed hosts if that is wanted; else raise."""
        seats = self.seats
        assert seats is not None
        with self._recovering:
            while failed := seats.failed():
                if self.options.on_worker_failure == "raise":
                    seats.raise_failures()
                seat = failed[0]
                assert seat.failure is not None
                if self._restarts() >= self.options.max_restarts:
                    if not getattr(seat.failure, "__notes__", None):
                        note = f"max_restarts={self.options.max_restarts} are used up"
                        seat.failure.add_note(note)
                    raise seat.failure
                seats.replace(seat)

    def _generations(self) -> dict[int, int]:
        """Who is there, by number; nobody's place is being taken by another at that moment."""
        with self._recovering:
            return {seat.host: seat.generation for seat in self.hosts}

    def _recover(
        self, error: WorkerError, generations: Mapping[int, int], *lost: type[WorkerError]
    ) -> None:
        """See to the hosts that failed in these lives; raise what else the error says.

        lost: the kinds of errors after which a host counts as failed.
        """
        assert self.seats is not None
        with self._recovering:
            others = self.seats.note(error, generations, lost)
            self._see_to_failures()
        if others:
            raise combine(others)

    def _restarts(self) -> int:
        assert self.seats is not None
        return sum(frame_counts["restarts"] for frame_counts in self.seats.all_frame_counts())

    def _publish(self, by_model: Mapping[str, Any], worker_ids: Any) -> None:
        generations = self._generations()
        everybody = None
        if self.capacity > len(generations):  # schemes count all places, also those where nobody is
            everybody, worker_ids = list(generations), _among(generations, worker_ids)
        try:
            self.publisher.publish(by_model, worker_ids, everybody=everybody)
        except WorkerError as error:  # a successor takes the newest weights when it is opened
            self._recover(error, generations, WorkerDied)

    # -- control

    def _call(self, method: str, *args: Any) -> list[Any]:
        found = self._ask(method, lambda seat: args)
        return [one for each in found for one in each] if method == "getattr_env" else found

    def _ask(
        self,
        method: str,
        arguments: Callable[[NodeHandle], tuple[Any, ...]],
        chosen: Sequence[NodeHandle] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Have hosts do something; those that are lost over it are replaced, and asked again."""
        assert self.seats is not None
        self._raise_error()
        while True:
            generations = self._generations()
            try:
                return self.seats.call(method, arguments, chosen, timeout)
            except WorkerError as error:
                self._recover(error, generations, WorkerDied, WorkerTimeout)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments and policies of all hosts, and start new episodes."""
        self.seed = check_seed(seed)
        assert self.seats is not None
        for seat in self.hosts:
            seat.seed = self.seed
            job = self.seats.jobs[seat.host]
            job.seeds = Seeds(self.seed, seat.host, job.seeds.generation, static_seed)
        jobs = self.seats.jobs
        self._ask("set_seed", lambda seat: (jobs[seat.host].seeds,))
        return next_seed(self.seed)

    def reset(self, reset_idx: Any = None) -> None:
        """Start new episodes in all environments, or in some, counted over all hosts."""
        assert self.seats is not None
        if reset_idx is None:
            self._call("reset", None)
            return
        which = as_mask(reset_idx, max(s.first_env + s.num_envs for s in self.hosts))
        for seat in self.hosts:
            mine = np.flatnonzero(which[seat.first_env : seat.first_env + seat.num_envs]).tolist()
            if mine:
                self._ask("reset", functools.partial(_only, mine), [seat])

    def _hold(self, still: bool) -> None:
        assert self.seats is not None
        self.seats.hold(True)
        self.seats.holds += 1  # the last one counts, though an interrupted one may arrive after it
        try:
            self._call("hold", still, self.seats.holds)
        finally:
            self.seats.hold(still)

    # -- saving

    def _worker_states(self) -> list[dict[str, Any]]:
        return self._call("state_dict")

    def _trajectory_states(self) -> list[dict[str, Any]]:
        return [seat.trajectories.state_dict() for seat in self.hosts]

    def _load_worker_states(self, states: list[dict[str, Any]], base: int) -> list[bool]:
        assert self.seats is not None
        # On their own, hosts are ahead of what was delivered: what lay between is gone, and so is
        # what they made here before.
        of = {seat.host: state for seat, state in zip(self.hosts, states, strict=True)}
        timeout, held = self.options.timeout + self.options.resume_timeout, self.seats.held
        self.seats.hold(True)  # no frames are expected of a host that replays episodes
        try:
            found = self._ask(
                "load_state_dict", lambda seat: (of[seat.host], base, self.sync), timeout=timeout
            )
        finally:
            self.seats.hold(held)
        for seat, (same, first) in zip(self.hosts, found, strict=True):
            self.seats.drop_before(seat, first)
            seat.trajectories.load_state_dict(of[seat.host]["trajectories"], under_way=same)
            seat.numbered = seat.generation
            job = self.seats.jobs[seat.host]
            job.seeds, job.version_base = Seeds(**of[seat.host]["seeds"]), base
            seat.seed = job.seeds.seed
        return [same for same, _ in found]

    def _counters(self) -> dict[str, Any]:
        assert self.seats is not None
        self.seats.refresh()
        hosts = self.seats.all_frame_counts()
        names = ("collected", "delivered", "dropped", "in_flight", "restarts", "preempted")
        return {name: sum(host[name] for host in hosts) for name in names} | {"workers": hosts}

    # -- ending

    def _close(self, timeout: float, close_env: bool) -> None:
        patience = 0.0  # after an interrupt nobody is waited for any more
        try:
            if self.seats is not None:
                self.seats.close(timeout, close_env=close_env)
            if self.launcher is not None and hasattr(self, "publisher"):
                self.publisher.shutdown()  # while there is an engine to say goodbye with
            patience = timeout
        finally:
            if self.launcher is not None:
                self.launcher.close(patience)


_REFUSED = {
    "num_workers": "num_workers={value}: {kind} has num_collectors={value}, or workers in each of "
    "them, num_workers_per_collector={value}",
    "start_method": "start_method={value!r}: {kind} starts no workers here",
    "cat_results": "cat_results={value!r} is not for {kind}, whose batches lie one below the other",
    "preemptive_threshold": "preemptive_threshold={value}: {kind} cannot cut what others collect",
}


def _among(there: Collection[int], worker_ids: Any) -> list[int] | None:
    """Who is named, if all of them are there."""
    if worker_ids is None:
        return None
    chosen = list(worker_ids) if isinstance(worker_ids, Iterable) else [worker_ids]
    for one in chosen:
        if one not in there:
            known = ", ".join(map(str, there))
            raise ValueError(f"worker_ids: no collector {one!r}, there are {known}")
    return chosen


def _only(chosen: list[int], seat: NodeHandle) -> tuple[list[int]]:
    return (chosen,)


def _portable(policy: Any) -> Any:
    """The policy as a machine without this one's devices can take it."""
    if isinstance(policy, nn.Module):
        tensors = [*policy.parameters(), *policy.buffers()]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return copy.deepcopy(policy).cpu()
    return policy


def _check_alike(parts: Sequence[dict[Key, Any]], seats: Sequence[NodeHandle]) -> None:
    first = {key: (value.shape[2:], value.dtype) for key, value in parts[0].items()}
    for part, seat in zip(parts[1:], seats[1:], strict=True):
        mine = {key: (value.shape[2:], value.dtype) for key, value in part.items()}
        for key in first.keys() | mine.keys():
            if first.get(key) != mine.get(key):
                raise ValueError(
                    f"collector {seats[0].host} and collector {seat.host} differ in "
                    f"{'/'.join(key)!r}: one batch cannot hold both (sync=False hands them apart)"
                )
