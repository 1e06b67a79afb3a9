"""Hosts that join their trainer: started here, or one a rank by torchrun or a job scheduler."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from collectors.remote.base import RemoteCollector
from collectors.remote.launcher import Launcher
from collectors.remote.local_processes import Processes
from collectors.remote.node import close_all
from collectors.remote.options import RemoteArguments, taken
from collectors.remote.torchrun_ranks import Ranks, check_launcher
from collectors.signatures import takes
from collectors.workers.channel import CannotReplace
from collectors.workers.startup import ignore_signals


class ProcessGroupLauncher(Launcher):
    """One process a host, which finds the trainer and calls `serve` of the engine's module.

    With `ranks` they are there already, and nobody here can start more.
    """

    def __init__(
        self,
        make_engine: Callable[..., Any],
        serve: Callable[..., Any],
        num_hosts: int,
        *,
        host: str,
        port: int,
        address: str | None,
        timeout: float,
        silence_s: float,
        ranks: Ranks | None = None,
    ):
        self._serve = serve
        self._options = {"address": address, "timeout": timeout, "silence_s": silence_s}
        engine = make_engine(num_hosts, host=host, port=port, **self._options)
        self.engine = self._engine = engine
        self._processes: Processes | None = None
        try:
            if ranks is not None:
                ranks.tell_port(engine.port, timeout)
                engine.connect()
                return
            self._processes = Processes()
            for number in range(num_hosts):
                self._start(number)
            self._processes.await_meeting(range(num_hosts), engine.connect)
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, number: int) -> None:
        assert self._processes is not None
        options = {**self._options, "host": self._engine.host, "port": self._engine.port}
        self._processes.start(number, functools.partial(self._serve, number, **options))

    def replace(self, host: int) -> None:
        if self._processes is None:
            raise CannotReplace(
                "whoever started the ranks must start another; torchrun does, with --max-restarts, "
                "the whole run anew"
            )
        self._end(host)
        self._start(host)
        try:
            self._processes.await_meeting([host], functools.partial(self._engine.admit, host))
        except BaseException:
            self._end(host)  # before another has to wait for its turn to join
            raise

    def _end(self, host: int) -> None:
        assert self._processes is not None
        self._processes.end(host)
        self._engine.release(host)

    def close(self, timeout: float) -> None:
        try:
            self._engine.close()
        finally:
            if self._processes is not None:
                self._processes.end_all(timeout)


@dataclass(frozen=True, kw_only=True)
class JoiningOptions:
    """How processes join.

    launcher: "local" starts them here; "env" takes the ranks that torchrun or a scheduler started:
        rank 0 makes this collector, all others call `serve_rank`. None: "env" if there are ranks.
    host, port: where the trainer's store is ("local"); port 0 takes a free one.
    address: what this process's connections bind to; `host` unless told.
    """

    launcher: Literal["local", "env"] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    address: str | None = None


@dataclass(frozen=True)
class JoiningArguments(RemoteArguments, JoiningOptions):
    """What collectors in processes that join take."""


class ProcessGroupCollector(RemoteCollector):
    """Collectors in processes that join this one, as `JoiningOptions` say."""

    @takes(JoiningArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        joining = taken(JoiningOptions, options)
        if not 0 <= joining.port <= 65535:
            raise ValueError(f"port={joining.port}: expected 0 to 65535")
        self._host, self._port, self._address = joining.host, joining.port, joining.address
        self._ranks: Ranks | None = None
        if check_launcher(joining.launcher) == "env":
            self._ranks = Ranks.of()
            if self._ranks.rank != 0:
                raise ValueError(
                    f"RANK={self._ranks.rank}: rank 0 makes the collector, all others call "
                    "serve_rank()"
                )
            self._host, self._port = self._ranks.address, self._ranks.own_port()
            check_count(options, self._ranks)
        super().__init__(create_env_fn, policy, **options)

    @staticmethod
    @abstractmethod
    def _way() -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The engine, and `serve` for its peers."""

    def _launch(self, num_hosts: int) -> Launcher:
        make_engine, serve = self._way()
        return ProcessGroupLauncher(
            make_engine,
            serve,
            num_hosts,
            host=self._host,
            port=self._port,
            address=self._address,
            timeout=self.options.start_timeout,
            silence_s=self.options.timeout,
            ranks=self._ranks,
        )


def check_count(options: dict[str, Any], ranks: Ranks) -> None:
    """One collector a rank, but for the trainer's."""
    asked = options.setdefault("num_collectors", ranks.num_hosts)
    if asked != ranks.num_hosts:
        raise ValueError(
            f"num_collectors={asked}: WORLD_SIZE={ranks.world_size}, so there are "
            f"{ranks.num_hosts} ranks besides the trainer's"
        )


def serve_rank(
    serve: Callable[..., str],
    *,
    address: str | None = None,
    timeout: float = 60.0,
    silence_s: float = 60.0,
) -> str:
    """Be this rank's host until the trainer says stop, or is gone; says which."""
    ranks = Ranks.of()
    ignore_signals()
    try:
        return serve(
            ranks.host,
            host=ranks.address,
            port=ranks.ask_port(timeout),
            address=address,
            timeout=timeout,
            silence_s=silence_s,
        )
    finally:
        close_all()
