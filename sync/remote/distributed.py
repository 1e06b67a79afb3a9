"""Calls over torch.distributed: rank 0 is the trainer, every other rank a peer.

    trainer (rank 0)                          peer i (rank i + 1)
    ----------------                          -------------------
    DistributedEngine(n, host, port)          serve(i, host, port)
      opens a TCPStore at host:port  <-----     writes down that it is there
    connect()  or  admit(i)          ----->     a gloo group of these two, and a `Line` over it
    route(i, j)                      ----->     the same between peers i and j
    call(i, f, x)                    <---->     runs f(x)
    close()                          ----->     serve() returns

A peer that comes late, or in the place of a dead one, is met in the same way at any time. Nothing
here is authenticated, so everything binds to loopback unless told otherwise.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

from sync.remote.addresses import LOOPBACK, address_towards, warn_if_exposed
from sync.remote.engine import Engine, PeerDied
from sync.remote.inbox import hang_up
from sync.remote.line import Line, make_group
from sync.remote.store import find_store, open_store

_LOOK_S = 0.01


class DistributedEngine(Engine):
    """The trainer's side.

    host, port: where peers find the trainer's store; port 0 takes a free one, see `port`.
    address: what this process's own connections bind to; `host` unless told.
    timeout: seconds that `connect` and `admit` wait.
    silence_s: seconds without a sign of life after which a peer counts as gone.
    """

    hands_on = True

    def __init__(
        self,
        num_peers: int,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        address: str | None = None,
        timeout: float = 60.0,
        silence_s: float = 60.0,
    ):
        warn_if_exposed("torch.distributed", host, address or host)
        self.num_peers = num_peers
        self.timeout = timeout
        self._silence_s = silence_s
        self._address = address or host
        self._lines: dict[int, Line] = {}
        self._met: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._routes: dict[tuple[int, int], _Meeting] = {}
        self._store = open_store(host, port, timeout)
        self.host, self.port = host, self._store.port

    def connect(self, given_up: threading.Event | None = None) -> None:
        """Meet every peer that has not been met; `given_up` ends the wait for them."""
        missing = [peer for peer in range(self.num_peers) if peer not in self._lines]
        self._meet_all(missing, given_up or threading.Event())

    def admit(self, peer: int, given_up: threading.Event | None = None) -> None:
        """Meet a peer that came late, or one that takes the place of a dead one."""
        self._meet_all([peer], given_up or threading.Event())

    def _meet_all(self, missing: list[int], given_up: threading.Event) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            for peer in [peer for peer in missing if self._is_there(peer)]:
                self._meet(peer, deadline)
                missing.remove(peer)
            if not missing:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(self._absent(missing))
            if given_up.wait(_LOOK_S):
                return

    def _is_there(self, peer: int) -> bool:
        return self._store.add(_came(peer), 0) > self._met.get(peer, 0)

    def _absent(self, peers: list[int]) -> str:
        ranks = ", ".join(f"{peer} (rank {peer + 1})" for peer in peers)
        return (
            f"peer {ranks} did not come to {self.host}:{self.port} within {self.timeout:g} s: was "
            "its process started, and does it call serve() with this host and port?"
        )

    def _meet(self, peer: int, deadline: float) -> None:
        if (before := self._lines.pop(peer, None)) is not None:
            before.close()
        number = self._store.add(_came(peer), 0)
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
        self._lines[peer] = Line(group, 1, self.describe(peer), silence_s=self._silence_s)

    def call(self, peer: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if (line := self._lines.get(peer)) is None:
            future: Future[Any] = Future()
            future.set_exception(PeerDied(f"{self.describe(peer)} was never met: call connect()"))
            return future
        return line.call(function, *args)

    def post(self, peer: int, function: Callable[..., Any], parcel: Any, *args: Any) -> Future[Any]:
        if (line := self._lines.get(peer)) is None:
            return self.call(peer, function, parcel, *args)
        return line.post(function, parcel, *args)

    def route(self, taker: int, giver: int) -> LineRoute | None:
        """Has the two meet when it is asked first; until they have met there is no route."""
        if self.gone(giver) is not None or self.gone(taker) is not None:
            return None
        who = self._met[taker], self._met[giver]
        found = self._routes.get((taker, giver))
        if found is None or found.who != who:
            name = f"between/{taker}-{who[0]}/{giver}-{who[1]}"
            sides = ((taker, 0, giver), (giver, 1, taker))
            meeting = [
                self.call(one, _join, name, rank, self.describe(other), self._silence_s)
                for one, rank, other in sides
            ]
            found = self._routes[taker, giver] = _Meeting(who, name, meeting)
        met = all(future.done() and future.exception() is None for future in found.sides)
        return LineRoute(found.name) if met else None

    def gone(self, peer: int) -> str | None:
        if (line := self._lines.get(peer)) is None:
            return "it was never met"
        return line.why if line.ended.is_set() else None

    def describe(self, peer: int) -> str:
        where = f": {self._names[peer]}" if peer in self._names else ""
        return f"peer {peer} (rank {peer + 1}{where})"

    def close(self) -> None:
        """Let every peer's `serve` return."""
        for line in self._lines.values():
            line.close()


class _Meeting(NamedTuple):
    """Two peers that were told to make a line between them."""

    who: tuple[int, int]  # as which newcomers they were met
    name: str
    sides: list[Future[Any]]


class LineRoute(NamedTuple):
    """A peer's way to another: a line that both have under this name."""

    name: str

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return _between[self.name].call(function, *args)


class _Here(NamedTuple):
    """How this peer found the trainer."""

    peer: int
    host: str
    port: int
    address: str
    timeout: float


_here: list[_Here] = []
_between: dict[str, Line] = {}


def _join(name: str, rank: int, whose: str, silence_s: float) -> None:
    """Make a line to another peer, which is told to do the same."""
    for other, line in list(_between.items()):
        if line.ended.is_set():
            del _between[other]
    here = _here[0]
    # A store of its own: others of this process would wait for each other.
    store = find_store(here.host, here.port, here.timeout, here.peer)
    group = make_group(store, name, rank, here.address, here.timeout)
    _between[name] = Line(group, 1 - rank, whose, silence_s=silence_s)


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
    warn_if_exposed("torch.distributed", address)
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
    _here[:] = [_Here(peer, host, port, address, timeout)]
    line = Line(group, 0, where, silence_s=silence_s)
    line.ended.wait()
    hang_up(f"{where}: {line.why}")
    for ended in (line, *_between.values()):
        ended.close()
    _between.clear()
    return line.why


def _came(peer: int) -> str:
    return f"peer/{peer}/came"
