"""Workers as actors of a Ray cluster: a running one, or one that is started here."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.options.check_types import check_fields
from collectors.options.collector_options import per_worker, takes
from collectors.options.remote_options import RemoteArguments, taken
from collectors.remote.remote_collector import RemoteCollector
from collectors.remote.remote_handle import Launcher
from collectors.workers.handle import CannotReplace
from sync import RayWeightSyncScheme
from sync.remote.ray_engine import LEFT, RayEngine, is_connected, use_token_authentication

MAX_CONCURRENCY = 16  # calls that an actor serves at a time, beside those for its workers
TRY_S = 45.0  # how long Ray tries once to reach a cluster
_WHOLE_S = 30.0  # the time in which our own cluster starts or ends
_TRIES = "RAY_gcs_server_port_wait_time_s"  # a number of tries, whatever its name says
_JOINING = threading.Lock()
_REFUSED = ("max_concurrency", "max_restarts", "name", "lifetime")


class WorkerActor:
    """A process for a worker; everything in it is called from outside."""


class RayLauncher(Launcher):
    """Starts actors. The last launcher in a cluster that one of them joined or started leaves it.

    configs: what each actor takes of the cluster. max_concurrency: calls that it serves at a time.
    """

    def __init__(
        self,
        configs: Sequence[Mapping[str, Any]],
        *,
        address: str | None,
        init_config: Mapping[str, Any],
        timeout: float,
        max_concurrency: int = MAX_CONCURRENCY,
    ):
        self._configs = configs
        self._max_concurrency = max_concurrency
        self._timeout = timeout
        self._actors: dict[int, Any] = {}
        with _JOINING:
            self._membership = _join(configs, address, init_config, timeout)
            if self._membership is not None:
                self._membership.launchers += 1
        self.engine = self._engine = RayEngine([None] * len(configs))
        try:
            self._start(range(len(configs)))
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, workers: Iterable[int]) -> None:
        """Start actors, and wait until the cluster has found a place for each."""
        import ray

        ready: dict[int, Future[Any]] = {}
        for worker in workers:
            config = self._configs[worker]
            # Ray's own default would fill the trainer's machine first.
            takes = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **config}
            actor = ray.remote(WorkerActor).options(**takes, max_concurrency=self._max_concurrency)
            self._actors[worker] = actor.remote()
            ready[worker] = self._actors[worker].__ray_ready__.remote().future()
        wait(ready.values(), self._timeout)  # unlike `ray.wait`, it passes an interrupt on
        if missing := [worker for worker, answer in ready.items() if not answer.done()]:
            asked = self._configs[missing[0]]
            free = {name: n for name, n in ray.available_resources().items() if ":" not in name}
            raise TimeoutError(
                f"Ray found no place for worker {', '.join(map(str, missing))} within "
                f"start_timeout={self._timeout:g} s; each asks for {asked or '1 CPU'}, and {free} "
                "are free"
            )
        for worker, answer in ready.items():
            answer.result()
            self._engine.replace(worker, self._actors[worker])

    def replace(self, worker: int) -> None:
        """End the actor, and start another; again if Ray put it on a machine that was lost."""
        from ray.exceptions import RayActorError

        self._remove(worker)

        if not is_connected():
            raise CannotReplace(LEFT)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self._start([worker])
                return
            except BaseException as error:
                self._remove(worker)  # else Ray may start it later
                if not isinstance(error, RayActorError) or time.monotonic() > deadline:
                    raise

    def _remove(self, worker: int) -> None:
        """End the actor with this number."""
        import ray

        actor = self._actors.pop(worker, None)
        if actor is not None and is_connected():
            with contextlib.suppress(Exception):  # it may be dead already
                ray.kill(actor, no_restart=True)
        self._engine.replace(worker, None)

    def close(self, timeout: float) -> None:
        for worker in list(self._actors):
            self._remove(worker)
        with _JOINING:
            membership, self._membership = self._membership, None
            if membership is not None:
                membership.launchers -= 1
                if not membership.launchers:
                    membership.end()


def _join(
    configs: Sequence[Mapping[str, Any]],
    address: str | None,
    init_config: Mapping[str, Any],
    timeout: float,
) -> Membership | None:
    """Connect this process to a cluster; None if its user did that."""
    use_token_authentication(joins=address is not None or "address" in init_config)
    import ray

    if ray.is_initialized():
        if address is not None or init_config:
            argument = f"address={address!r}" if address is not None else "ray_init_config"
            raise ValueError(f"{argument}: this process is already connected to a Ray cluster")
        return Membership.current
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address is not None:
        return _join_running({**options, "address": address, **init_config}, address, timeout)
    wanted = sum(float(config.get("num_cpus", 1)) for config in configs)
    options |= {
        "address": "local",
        "num_cpus": max(os.cpu_count() or 1, math.ceil(wanted)),
        "include_dashboard": False,
    }
    return Membership({**options, **init_config}, _WHOLE_S)


def _join_running(options: Mapping[str, Any], address: str, timeout: float) -> Membership:
    """Join the cluster at this address. Left to itself, Ray tries 20 times, for 14 minutes."""
    before = os.environ.get(_TRIES)
    os.environ.setdefault(_TRIES, str(max(1, int(timeout / TRY_S))))
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), timeout).close()
        return Membership(options, 0.0)
    except OSError as error:
        why = str(error.__cause__ or error).strip().splitlines()[-1]
        raise ConnectionError(f"cannot join a Ray cluster at address={address!r}: {why}") from None
    finally:
        if before is None:
            del os.environ[_TRIES]


class Membership(threading.Thread):
    """This process's time in a cluster, from `ray.init` to `ray.shutdown`, in a thread of its own.

    What Ray starts ends with the thread that started it, so the thread stays. On the main thread,
    Ray would take SIGTERM, and an interrupt would leave half a cluster.

    whole_s: how long an interrupt waits until what was begun can be ended.
    """

    current: ClassVar[Membership | None] = None

    def __init__(self, options: Mapping[str, Any], whole_s: float):
        super().__init__(name="lockstep-ray", daemon=True)
        self.launchers = 0  # that are in the cluster by it
        self._options = options
        self._joined: Future[None] = Future()
        self._over = threading.Event()
        self.start()
        try:
            wait([self._joined])
        except BaseException:
            self.end(whole_s)
            raise
        self._joined.result()
        Membership.current = self

    def end(self, timeout: float = _WHOLE_S) -> None:
        """Leave the cluster; one that was started for this membership ends."""
        Membership.current = None
        self._over.set()
        self.join(timeout)

    def run(self) -> None:
        import ray

        logging.getLogger("ray._private.worker").addFilter(_is_worth_printing)
        try:
            ray.init(**self._options)
        except BaseException as error:  # noqa: BLE001 - raised where the membership is made
            self._joined.set_exception(error)
            return
        self._joined.set_result(None)
        self._over.wait()
        ray.shutdown()


def _is_worth_printing(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("SIGTERM handler is not set")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The Ray cluster, and the resources that actors reserve.

    address: the address of the cluster ("auto" for the one of this machine). None: the cluster that
        this process is connected to, or one that is started here and ended with its last collector.
    ray_init_config: further arguments of `ray.init`.
    remote_configs: options of an actor, such as `num_cpus`, `num_gpus`, `resources` and
        `scheduling_strategy`; one for all, or a list with one for each worker.
    """

    address: str | None = None
    ray_init_config: Mapping[str, Any] | None = None
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class RayArguments(RemoteArguments, ClusterOptions):
    """What a `RayCollector` takes."""


class RayCollector(RemoteCollector):
    """Workers in actors of a Ray cluster, as `ClusterOptions` say."""

    kind = "RayCollector"
    _scheme_class = RayWeightSyncScheme

    @takes(RayArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        cluster = taken(ClusterOptions, options)
        self._address = cluster.address
        self._init_config = dict(cluster.ray_init_config or {})
        self._configs = cluster.remote_configs or {}
        for config in [self._configs] if isinstance(self._configs, Mapping) else self._configs:
            for name in _REFUSED:
                if name in config:
                    raise ValueError(f"remote_configs: {name} is set by the collector")
        super().__init__(create_env_fn, policy, **options)

    def _launch(self) -> Launcher:
        return RayLauncher(
            per_worker(self._configs, self.num_workers, "remote_configs"),
            address=self._address,
            init_config=self._init_config,
            timeout=self.options.start_timeout,
        )
