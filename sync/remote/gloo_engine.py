"""Calls over torch.distributed: rank 0 is the trainer, every other rank a peer.

    trainer (rank 0)                          peer i (rank i + 1)
    ----------------                          -------------------
    DistributedEngine(n, host, port)          serve(i, host, port)
      opens a TCPStore at host:port  <-----     writes its name into the store
    connect()  or  admit(i)          ----->     a gloo group of these two, and a `GlooConnection`
    call(i, f, x)                    <---->     runs f(x)
    close()                          ----->     serve() returns

A peer that comes late, or in the place of a dead one, is met in the same way at any time. There is
no authentication, so everything binds to loopback unless told otherwise.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from sync.remote.addresses_and_stores import (
    LOOPBACK,
    JoiningEngine,
    address_towards,
    find_store,
    warn_if_exposed,
)
from sync.remote.engine import PeerDied
from sync.remote.gloo_connection import GlooConnection, close_together, make_group
from sync.remote.inbox import close_all


class DistributedEngine(JoiningEngine):
    """The trainer's side; `JoiningEngine` describes the arguments."""

    mechanism = "gloo"

    def __init__(self, num_peers: int, **options: Any):
        super().__init__(num_peers, **options)
        self._connections: dict[int, GlooConnection] = {}
        self._met: dict[int, int] = {}  # how often each peer had come when it was met

    def _meet(self, peer: int, deadline: float) -> bool:
        number = self._store.add(_came(peer), 0)
        if number <= self._met.get(peer, 0):
            return False
        if (before := self._connections.pop(peer, None)) is not None:
            before.close()
        self._names[peer] = self._store.get(f"{_came(peer)}/{number}").decode()
        self._met[peer] = number
        pair = f"pair/{peer}/{number}"
        self._store.set(f"{pair}/go", "")
        left = max(1.0, deadline - time.monotonic())
        try:
            group = make_group(self._store, pair, 0, self._address, left)
        except RuntimeError as error:
            raise ConnectionError(
                f"{self.describe(peer)} came, and then could not be connected with from "
                f"{self._address} within {left:g} s: {str(error).splitlines()[0]}"
            ) from None
        self._connections[peer] = GlooConnection(
            group, 1, self.describe(peer), silence_s=self._silence_s
        )
        return True

    def call(self, peer: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if (connection := self._connections.get(peer)) is not None:
            return connection.call(function, *args)
        future: Future[Any] = Future()
        future.set_exception(PeerDied(f"{self.describe(peer)} was never met: call connect()"))
        return future

    def gone(self, peer: int) -> str | None:
        if (connection := self._connections.get(peer)) is None:
            return "it was never met"
        return connection.why if connection.ended.is_set() else None

    def describe(self, peer: int) -> str:
        where = f": {self._names[peer]}" if peer in self._names else ""
        return f"peer {peer} (rank {peer + 1}{where})"

    def close(self) -> None:
        """Let every peer's `serve` return."""
        close_together(self._connections.values())


def serve(
    peer: int,
    *,
    host: str = LOOPBACK,
    port: int,
    address: str | None = None,
    timeout: float = 60.0,
    silence_s: float = 60.0,
) -> str:
    """Be peer number `peer` of the trainer at `host:port` until it closes or is gone; says which.

    address: what this process's connections bind to; loopback if the host is, else this machine's
        address on the way to the host.
    timeout: seconds to find the trainer, and to be met by it.
    """
    where = f"the trainer at {host}:{port}"
    begun = time.monotonic()
    store = find_store(host, port, timeout, peer)
    address = address or address_towards(host, port)
    warn_if_exposed("gloo", address)
    number = store.add(f"peer/{peer}/counted", 1)
    store.set(f"{_came(peer)}/{number}", f"{socket.gethostname()}, {address}, pid {os.getpid()}")
    store.add(_came(peer), 1)
    left = max(1.0, timeout - (time.monotonic() - begun))
    pair = f"pair/{peer}/{number}"
    try:
        store.wait([f"{pair}/go"], timedelta(seconds=left))
        group = make_group(store, pair, 1, address, left)
    except RuntimeError as error:
        waited = time.monotonic() - begun >= timeout
        how = (
            f"did not meet it within {timeout:g} s; does it call connect() for {peer + 1} peers or "
            "more?"
            if waited
            else "was gone before it met it"
        )
        raise ConnectionError(
            f"peer {peer}: {where} {how} ({str(error).splitlines()[0]})"
        ) from None
    connection = GlooConnection(group, 0, where, silence_s=silence_s)
    connection.ended.wait()
    close_all(f"{where}: {connection.why}")
    connection.close()
    return connection.why


def _came(peer: int) -> str:
    return f"peer/{peer}/came"
