"""Hosts as actors of a Ray cluster: one that runs already, or one started here."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.base import ends_on_interrupt
from collectors.remote.base import RemoteCollector
from collectors.remote.launcher import Launcher
from collectors.remote.node import NodeSpec
from collectors.remote.options import RemoteArguments, taken
from collectors.rollout.seeds import Seeds
from collectors.signatures import takes
from collectors.workers.channel import CannotReplace
from sync import WeightSyncScheme
from sync.remote.engine import PeerDied
from sync.remote.ray import LEFT, RayEngine, is_connected, use_token_authentication

MAX_CONCURRENCY = 16  # calls that an actor serves at a time: batches, weights, questions
TRY_S = 45.0  # how long Ray may try once to reach a cluster
_WHOLE_S = 30.0  # in which a cluster of our own begins or ends
_NO_SIGTERM = "SIGTERM handler is not set"
_TRIES = "RAY_gcs_server_port_wait_time_s"  # so many tries, whatever its name says
_COMING_AND_GOING = threading.Lock()
_REFUSED = ("max_concurrency", "max_restarts", "name", "lifetime")


class NodeActor:
    """A process for a host; what it does is called into it."""


class Places(RayEngine):
    """The actors of a collector that has room for more: who is not there cannot be called."""

    def __init__(self, actors: Sequence[Any], capacity: int):
        super().__init__([*actors, *[None] * (capacity - len(actors))])

    def gone(self, peer: int) -> str | None:
        return "nobody has this place" if self._actors[peer] is None else super().gone(peer)

    def describe(self, peer: int) -> str:
        return f"peer {peer}" if self._actors[peer] is None else super().describe(peer)

    def _task(self, peer: int, *what: Any) -> Future[Any]:
        if self._actors[peer] is not None:
            return super()._task(peer, *what)
        absent: Future[Any] = Future()
        absent.set_exception(PeerDied(f"nobody has place {peer}"))
        return absent


class RayLauncher(Launcher):
    """Actors. The last that is in a cluster which one of them started, or joined, leaves it."""

    as_arrays = True
    _membership: ClassVar[Membership]  # of this process, if a fleet of it began one
    _in_ours: ClassVar[set[RayLauncher]] = set()  # the fleets that came since

    def __init__(
        self,
        configs: Sequence[Mapping[str, Any]],
        *,
        capacity: int,
        address: str | None,
        init_config: Mapping[str, Any],
        timeout: float,
    ):
        self._configs = [dict(config) for config in configs]
        self._timeout = timeout
        self._actors: dict[int, Any] = {}
        self._closed = False
        with _COMING_AND_GOING:
            begun = _begin(self._configs, capacity, address, init_config, timeout)
            if begun is not None:
                RayLauncher._membership = begun
                self._in_ours.clear()
                self._in_ours.add(self)
            elif self._in_ours:
                self._in_ours.add(self)
        try:
            for host in range(len(configs)):
                self._actors[host] = self._start(host)
            self._await_ready(list(self._actors))
            self.engine = self._engine = Places(list(self._actors.values()), capacity)
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, host: int) -> Any:
        import ray

        config = self._configs[host % len(self._configs)]
        takes = {"num_cpus": 1, **config, "max_concurrency": MAX_CONCURRENCY}
        return ray.remote(NodeActor).options(**takes).remote()

    def _await_ready(self, hosts: Sequence[int]) -> None:
        """Wait until the cluster has found a place for these."""
        import ray

        # Not `ray.wait`, which makes an error of its own of an interrupt.
        ready = {host: self._actors[host].__ray_ready__.remote().future() for host in hosts}
        wait(ready.values(), self._timeout)
        if missing := [host for host, answer in ready.items() if not answer.done()]:
            names = ", ".join(map(str, missing))
            asked = self._configs[missing[0] % len(self._configs)]
            raise TimeoutError(
                f"Ray found no place for collector {names} within start_timeout="
                f"{self._timeout:g} s; of the cluster's {_shown(ray.cluster_resources())} "
                f"there are {_shown(ray.available_resources())} free, and each asks for "
                f"{asked or '1 CPU'}"
            )
        for answer in ready.values():
            answer.result()

    def replace(self, host: int) -> None:
        self.remove(host)
        self.add(host)

    def add(self, host: int) -> None:
        """Start an actor with this number; another, where Ray put it on a node that was lost."""
        from ray.exceptions import RayActorError

        if not is_connected():
            raise CannotReplace(LEFT)
        deadline = time.monotonic() + self._timeout
        while True:
            self._actors[host] = self._start(host)
            try:
                self._await_ready([host])
                break
            except BaseException as error:
                self.remove(host)  # else it would be started when nobody wants it any more
                if not isinstance(error, RayActorError) or time.monotonic() > deadline:
                    raise
        self._engine.replace(host, self._actors[host])

    def remove(self, host: int) -> None:
        """End the actor with this number."""
        import ray

        actor = self._actors.pop(host, None)
        if actor is not None and is_connected():
            with contextlib.suppress(Exception):  # it may be dead already
                ray.kill(actor, no_restart=True)
        if hasattr(self, "_engine"):
            self._engine.replace(host, None)

    def close(self, timeout: float) -> None:
        if self._closed:
            return
        self._closed = True
        for host in list(self._actors):
            self.remove(host)
        if hasattr(self, "_engine"):
            self._engine.close()
        with _COMING_AND_GOING:
            if self in self._in_ours:
                self._in_ours.remove(self)
                if not self._in_ours:
                    self._membership.end()


def _begin(
    configs: Sequence[Mapping[str, Any]],
    capacity: int,
    address: str | None,
    init_config: Mapping[str, Any],
    timeout: float,
) -> Membership | None:
    """Be connected with a cluster; the membership, if this process had none before."""
    use_token_authentication()
    import ray

    if ray.is_initialized():
        if address is not None or init_config:
            given = f"address={address!r}" if address is not None else "ray_init_config"
            raise ValueError(f"{given}: this process is connected with a Ray cluster already")
        return None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address is not None:
        options["address"] = address
    else:
        most = max(float(config.get("num_cpus", 1)) for config in configs)
        wanted = most * capacity
        options |= {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, int(wanted + 0.999)),
            "include_dashboard": False,
        }
    try:
        with _bounded_search(address, timeout):
            member = Membership({**options, **init_config})
            member.begin(_WHOLE_S if address is None else 0.0)
    except OSError as error:
        if address is None:
            raise
        why = str(error.__cause__ or error).strip().splitlines()[-1]
        raise ConnectionError(f"no Ray cluster lets us in at address={address!r}: {why}") from None
    return member


class Membership(threading.Thread):
    """This process's time in a cluster, from `ray.init` to `ray.shutdown`, in a thread of its own.

    What Ray starts ends with the thread that started it, so this one stays. And it is not the main
    one, in which Ray takes SIGTERM and an interrupt leaves half a cluster.
    """

    def __init__(self, options: Mapping[str, Any]):
        super().__init__(name="lockstep-ray", daemon=True)
        self._options = options
        self._began: Future[None] = Future()
        self._over = threading.Event()

    def begin(self, whole_s: float) -> None:
        """Be in the cluster. An interrupt waits so long until what was begun can be ended."""
        self.start()
        try:
            wait([self._began])
        except BaseException:
            self.end(whole_s)
            raise
        self._began.result()

    def end(self, timeout: float = _WHOLE_S) -> None:
        """Leave it, waiting so long; one that was started with this membership ends."""
        self._over.set()
        self.join(timeout)

    def run(self) -> None:
        import ray

        try:
            with _without(_NO_SIGTERM):
                ray.init(**self._options)
        except BaseException as error:  # noqa: BLE001 - raised by `begin`
            self._began.set_exception(error)
            return
        self._began.set_result(None)
        self._over.wait()
        ray.shutdown()


@contextlib.contextmanager
def _without(message: str) -> Iterator[None]:
    """Keep one of Ray's warnings from the terminal."""
    logger = logging.getLogger("ray._private.worker")

    def others(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(message)

    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


@contextlib.contextmanager
def _bounded_search(address: str | None, timeout: float) -> Iterator[None]:
    """Have Ray give up on an address in time; left to itself it tries 20 times, for 14 minutes."""
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    before = os.environ.get(_TRIES)
    os.environ[_TRIES] = before or str(max(1, int(timeout / TRY_S)))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TRIES]


def _shown(resources: Mapping[str, float]) -> str:
    known = {name: value for name, value in resources.items() if ":" not in name}
    shown = (f"{value:g} {name}" for name, value in sorted(known.items()) if "memory" not in name)
    return ", ".join(shown) or "nothing"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which Ray cluster, and what of it.

    address: of the cluster ("auto" for the one of this machine). None: the one that this process is
        connected with, or one that is started here, and ended with the last collector in it.
    ray_init_config: further arguments of `ray.init`.
    remote_configs: what an actor takes of the cluster, as `num_cpus`, `num_gpus`, `resources` and
        `scheduling_strategy`; one for all, or a list with one for each collector.
    """

    address: str | None = None
    ray_init_config: Mapping[str, Any] | None = None
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class RayArguments(RemoteArguments, ClusterOptions):
    """What a `RayCollector` takes."""


class RayCollector(RemoteCollector):
    """Collectors in actors of a Ray cluster, as `ClusterOptions` say.

    Some can be added and removed while it runs. There is room for twice as many as at first, unless
    `max_collectors` says otherwise.
    """

    kind = "RayCollector"
    _room = 2

    @takes(RayArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        cluster = taken(ClusterOptions, options)
        self._address = cluster.address
        self._init_config = dict(cluster.ray_init_config or {})
        self._configs = cluster.remote_configs or {}
        for config in [self._configs] if isinstance(self._configs, Mapping) else self._configs:
            for name in _REFUSED:
                if name in config:
                    raise ValueError(f"remote_configs: {name} is the collector's own to say")
        super().__init__(create_env_fn, policy, **options)

    @property
    def _scheme_class(self) -> type[WeightSyncScheme]:
        from sync import RayWeightSyncScheme

        return RayWeightSyncScheme

    def _launch(self, num_hosts: int) -> Launcher:
        configs = self._configs
        if isinstance(configs, Mapping):
            configs = [configs] * num_hosts
        if len(configs) != num_hosts:
            raise ValueError(
                f"remote_configs has {len(configs)} entries for {num_hosts} collectors"
            )
        return RayLauncher(
            configs,
            capacity=self.capacity,
            address=self._address,
            init_config=self._init_config,
            timeout=self.options.start_timeout,
        )

    @ends_on_interrupt
    def add_collector(self) -> int:
        """Start one more, which is told what the first one was; its number."""
        assert isinstance(self.launcher, RayLauncher)
        with self._lock, self._recovering:
            self._raise_error()
            free = self._free_place()
            self.launcher.add(free)
            try:
                self._pool.start([self._handle(self._newcomer(free))])
            except BaseException:
                self.launcher.remove(free)
                raise
            self.num_workers = len(self.handles)
            self._publish(dict.fromkeys(self.publisher.schemes), [free])
        return free

    def _free_place(self) -> int:
        taken = {handle.index for handle in self.handles}
        free = [index for index in range(self.capacity) if index not in taken]
        if not free:
            raise RuntimeError(
                f"all {self.capacity} places are taken: give max_collectors more, or remove one"
            )
        return free[0]

    def _newcomer(self, index: int) -> NodeSpec:
        """What it is told: to have random streams that nobody has had in its place."""
        spec, first = self._spec(index, like=0), self.handles[0]
        used = [one.spec.seeds.generation for one in self._pool.removed if one.index == index]
        generation = max(used, default=-1) + 1
        spec.seeds = Seeds(self.seed, index, generation, first.spec.seeds.static)
        return spec

    @ends_on_interrupt
    def remove_collector(self, collector: int) -> None:
        """Let one go; what it had made and not handed over is counted as dropped."""
        assert isinstance(self.launcher, RayLauncher)
        with self._lock, self._recovering:
            self._raise_error()
            found = [handle for handle in self.handles if handle.index == collector]
            if not found or len(self.handles) == 1:
                known = ", ".join(str(handle.index) for handle in self.handles)
                why = "it is the last one" if found else f"there are {known}"
                raise ValueError(f"collector {collector} cannot be removed: {why}")
            self._pool.remove(found[0], 2.0)
            self.launcher.remove(collector)
            self.num_workers = len(self.handles)
