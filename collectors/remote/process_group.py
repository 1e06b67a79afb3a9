"""Collectors whose workers join the trainer's process group: torch.distributed, or its RPC."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from collectors.options.check_types import Port, check_fields
from collectors.options.collector_options import takes
from collectors.options.remote_options import RemoteArguments, taken
from collectors.remote.host import close_all
from collectors.remote.local_processes import PeerProcesses
from collectors.remote.remote_collector import RemoteCollector
from collectors.remote.remote_handle import Launcher
from collectors.remote.torchrun_ranks import Ranks, check_launcher
from collectors.workers.handle import CannotReplace
from collectors.workers.process_lifetime import ignore_signals
from sync import DistributedWeightSyncScheme, RPCWeightSyncScheme
from sync.remote import gloo_engine, rpc_engine


class ProcessGroupLauncher(Launcher):
    """Starts a process for each worker, or connects to ranks that a launcher started.

    engine: waits for the processes to join.
    serve: what a process calls to join, and to serve as a peer.
    options: of the engine and of `serve`.
    """

    def __init__(
        self,
        engine: Any,
        serve: Callable[..., Any],
        *,
        ranks: Ranks | None,
        timeout: float,
        options: Mapping[str, Any],
    ):
        self.engine = self._engine = engine
        self._serve = serve
        self._options = {**options, "host": engine.host, "port": engine.port, "timeout": timeout}
        self._processes: PeerProcesses | None = None
        try:
            if ranks is not None:
                ranks.tell_port(engine.port, timeout)
                engine.connect()
                return
            self._processes = PeerProcesses()
            for worker in range(engine.num_peers):
                self._start(worker)
            self._processes.await_meeting(range(engine.num_peers), engine.connect)
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, worker: int) -> None:
        assert self._processes is not None
        self._processes.start(worker, functools.partial(self._serve, worker, **self._options))

    def replace(self, worker: int) -> None:
        if self._processes is None:
            raise CannotReplace(
                "only the launcher of the ranks can start another one; torchrun --max-restarts "
                "restarts the whole run"
            )
        self._processes.end(worker)
        self._start(worker)
        try:
            self._processes.await_meeting([worker], functools.partial(self._engine.admit, worker))
        except BaseException:
            self._processes.end(worker)
            raise

    def close(self, timeout: float) -> None:
        try:
            self._engine.close()
        finally:
            if self._processes is not None:
                self._processes.end_all(timeout)


@dataclass(frozen=True, kw_only=True)
class JoiningOptions:
    """How processes join.

    launcher: "local" starts them here; "env" uses the ranks that torchrun or a scheduler started:
        rank 0 creates this collector, all others call `serve_rank`. None: "env" if there are ranks.
    host, port: the address of the trainer's store ("local"); port 0 takes a free one.
    address: the address that this process's connections bind to; by default `host`.
    """

    launcher: Literal["local", "env"] | None = None
    host: str = "127.0.0.1"
    port: Port = 0
    address: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class JoiningArguments(RemoteArguments, JoiningOptions):
    """What collectors in processes that join take."""


class ProcessGroupCollector(RemoteCollector):
    """Workers in processes that join this one. `JoiningOptions` say how.

    Rank i + 1 of a launcher is worker i: there, `serve_rank` takes the place of the collector.
    """

    _engine_class: type[Any]
    _serve: Callable[..., str]

    @takes(JoiningArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        joining = taken(JoiningOptions, options)
        self._host, self._port, self._address = joining.host, joining.port, joining.address
        self._ranks: Ranks | None = None
        if check_launcher(joining.launcher) == "env":
            self._ranks = ranks = Ranks.of()
            if ranks.rank != 0:
                raise ValueError(
                    f"RANK={ranks.rank}: rank 0 creates the collector, all others call serve_rank()"
                )
            each = options.get("num_workers_per_collector", 1)
            number = options.setdefault("num_collectors", ranks.num_workers // each)
            if number * each != ranks.num_workers:
                raise ValueError(
                    f"num_collectors={number} of {each} workers: each worker is a rank, and "
                    f"WORLD_SIZE={ranks.world_size} leaves {ranks.num_workers} besides the trainer"
                )
            self._host, self._port = ranks.address, ranks.own_port()
        super().__init__(create_env_fn, policy, **options)

    def _launch(self) -> Launcher:
        timeout = self.options.start_timeout
        shared = {"address": self._address, "silence_s": self.options.timeout}
        engine = self._engine_class(
            self.num_workers, host=self._host, port=self._port, timeout=timeout, **shared
        )
        return ProcessGroupLauncher(
            engine, self._serve, ranks=self._ranks, timeout=timeout, options=shared
        )

    @classmethod
    def serve_rank(
        cls, *, address: str | None = None, timeout: float = 60.0, silence_s: float = 60.0
    ) -> str:
        """Run this rank's worker until the trainer ends or stops it; returns which."""
        ranks = Ranks.of()
        ignore_signals()
        try:
            return cls._serve(
                ranks.worker,
                host=ranks.address,
                port=ranks.ask_port(timeout),
                address=address,
                timeout=timeout,
                silence_s=silence_s,
            )
        finally:
            close_all()


class DistributedCollector(ProcessGroupCollector):
    """Workers in processes that torch.distributed joins to this one."""

    kind = "DistributedCollector"
    _scheme_class = DistributedWeightSyncScheme
    _engine_class = gloo_engine.DistributedEngine
    _serve = staticmethod(gloo_engine.serve)


class RPCCollector(ProcessGroupCollector):
    """Workers in processes that torch.distributed.rpc joins to this one; none can be replaced."""

    kind = "RPCCollector"
    _scheme_class = RPCWeightSyncScheme
    _engine_class = rpc_engine.RPCEngine
    _serve = staticmethod(rpc_engine.serve)

    def _launch(self) -> Launcher:
        if self.options.on_worker_failure == "restart":
            raise ValueError(
                'on_worker_failure="restart": torch\'s RPC cannot replace a process that died; '
                "use DistributedCollector"
            )
        return super()._launch()
