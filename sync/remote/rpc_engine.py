"""Calls over torch.distributed.rpc: the trainer is called "trainer", peer 3 "peer3".

    trainer                                   peer i
    -------                                   ------
    RPCEngine(n, host, port)                  serve(i, host, port)
      joins as "trainer", opens the store <--   joins the group at any time
    connect()  or  admit(i)          ----->   watches the trainer from now on
      watches the peer                 <---
    call(i, f, x)                    <---->   runs f(x)
    close()                          ----->   serve() returns

Each side watches the other with a call that never returns: it fails as soon as the connection does,
and occupies no thread. A second call, from time to time, finds what a broken connection does not
show: a host that is gone, or a pulled cable. torch allows one RPC agent in a process, so there can
be one engine. torch has no way to replace a member that died, and while one is dead nobody joins.
The transport has no authentication, so everything binds to loopback by default.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc as torch_rpc

from sync.remote.addresses_and_stores import (
    LOOPBACK,
    JoiningEngine,
    address_towards,
    find_store,
    warn_if_exposed,
)
from sync.remote.engine import PeerDied
from sync.remote.inbox import close_all
from sync.remote.pickled_calls import CallOutcome, pack, run, tell
from sync.remote.rpc_group import await_group, has_come, join, name_of

_TRAINER = "trainer"
_CLOSE_S = 2.0

_left = threading.Event()
_watched_by: dict[str, Any] = {}  # the calls that never return, by the names of their callers


class RPCEngine(JoiningEngine):
    """The trainer's side; `JoiningEngine` describes the arguments."""

    mechanism = "rpc"

    def __init__(self, num_peers: int, **options: Any):
        super().__init__(num_peers, **options)
        self._gone: dict[int, str] = {}
        self._pending: dict[Future[Any], int] = {}
        self._closing = threading.Event()
        join(_TRAINER, 0, self._store, self._address, self.timeout)
        self._beat = threading.Thread(target=self._beats, name="lockstep-alive", daemon=True)
        self._beat.start()
        atexit.register(self.close)  # an agent that outlives the interpreter aborts it

    def _meet(self, peer: int, deadline: float) -> bool:
        if peer in self._names:
            raise ConnectionError(
                f"{self.describe(peer)} joined before, and with torch's RPC no other process can "
                "take its place: use DistributedEngine"
            )
        if not has_come(self._store, peer):
            return False
        name = name_of(peer)
        try:
            watch = torch_rpc.rpc_async(name, _never, args=(_TRAINER,), timeout=0)
        except RuntimeError:  # it is joining
            return False
        self._names[peer] = name
        watch.add_done_callback(lambda done: self._note(peer, _error(done)))
        return True

    def _note(self, peer: int, why: str | None) -> None:
        if why is None or peer in self._gone or self._closing.is_set():
            return
        self._gone[peer] = why
        _watched_by.pop(self._names[peer], None)  # and with it the memory of its connection
        for future, whose in list(self._pending.items()):
            if whose == peer:
                self._fail(future, peer, why)

    def _fail(self, future: Future[Any], peer: int, why: str) -> None:
        self._pending.pop(future, None)
        with contextlib.suppress(InvalidStateError):
            future.set_exception(PeerDied(f"{self.describe(peer)} is gone: {why}"))

    def _beats(self) -> None:
        while not self._closing.wait(self._silence_s / 4):
            for peer, name in list(self._names.items()):
                if peer not in self._gone:
                    _ask_for_life(name, self._silence_s, partial(self._note, peer))

    def call(self, peer: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        data, tensors = pack((function, args))
        future: Future[Any] = Future()
        self._pending[future] = peer
        if (why := self.gone(peer)) is not None:
            self._fail(future, peer, why)
            return future
        name = self._names[peer]
        try:
            sent = torch_rpc.rpc_async(name, _run, args=(data, *tensors), timeout=0)
        except RuntimeError as error:
            self._fail(future, peer, str(error).splitlines()[0])
            return future
        sent.add_done_callback(lambda done: self._hear(peer, done, future))
        return future

    def _hear(self, peer: int, done: Any, future: Future[Any]) -> None:
        if (why := _error(done)) is not None:
            self._note(peer, why)
            self._fail(future, peer, why)
            return
        self._pending.pop(future, None)
        data, *tensors = done.value()
        tell(future, data, tensors, self.describe(peer))

    def gone(self, peer: int) -> str | None:
        if peer not in self._names:
            return "it was never met: call connect()"
        return self._gone.get(peer)

    def describe(self, peer: int) -> str:
        return f"peer {peer} ({self._names.get(peer, 'not met')})"

    def close(self) -> None:
        """Let every peer's `serve` return, and leave the group."""
        if self._closing.is_set():
            return
        atexit.unregister(self.close)
        left = [self.call(peer, _leave) for peer in self._names if peer not in self._gone]
        deadline = time.monotonic() + _CLOSE_S
        for future in left:
            with contextlib.suppress(PeerDied, TimeoutError):
                future.result(max(0.0, deadline - time.monotonic()))
        self._closing.set()
        for future, peer in list(self._pending.items()):
            self._fail(future, peer, "the engine was closed")
        self._beat.join(_CLOSE_S)
        torch_rpc.shutdown(graceful=False)
        _watched_by.clear()


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

    The arguments are those of `gloo_engine.serve`.
    """
    store = find_store(host, port, timeout, peer)
    address = address or address_towards(host, port)
    warn_if_exposed("rpc", address)
    name = name_of(peer)
    await_group(store, peer, timeout)
    join(name, peer + 1, store, address, timeout)
    _left.clear()
    why: list[str] = []

    def end(error: str | None) -> None:
        if error is not None:
            why.append(f"the trainer is gone: {error}")
            _left.set()

    watch = torch_rpc.rpc_async(_TRAINER, _never, args=(name,), timeout=0)
    watch.add_done_callback(lambda done: end(_error(done)))
    while not _left.wait(silence_s / 4):
        _ask_for_life(_TRAINER, silence_s, end)
    said = why[0] if why else "it left"
    close_all(f"the trainer at {host}:{port}: {said}")
    time.sleep(0.05)  # the answer to the call that said so must get out
    torch_rpc.shutdown(graceful=False)
    _watched_by.clear()
    return said


# -- what members run


@torch_rpc.functions.async_execution
def _run(data: bytes, *tensors: Tensor) -> torch.futures.Future[Any]:
    replied: torch.futures.Future[Any] = torch.futures.Future()

    def reply(done: Future[CallOutcome]) -> None:
        packed = done.result().packed()
        replied.set_result((packed.data, *packed.tensors))

    run(data, tensors).add_done_callback(reply)
    return replied


@torch_rpc.functions.async_execution
def _never(caller: str) -> torch.futures.Future[Any]:
    """A call that never returns, and occupies no thread meanwhile."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    _watched_by[caller] = future
    return future


def _alive() -> None:
    return None


def _leave() -> None:
    _left.set()


def _ask_for_life(name: str, within_s: float, tell: Callable[[str | None], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the watch has seen that connection break
        asked = torch_rpc.rpc_async(name, _alive, timeout=within_s)
        asked.add_done_callback(lambda done: tell(_error(done)))


def _error(done: Any) -> str | None:
    """Why a call failed that was not raised by the function called; None if it did not."""
    try:
        done.value()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if "timeout" in said.lower() or "timed out" in said.lower():
            return f"it gave no sign of life ({said})"
        return f"the connection broke ({said.split(' (this error')[0]})"
    return None
