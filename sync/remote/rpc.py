"""Calls over torch.distributed.rpc: the trainer is called "trainer", peer 3 "peer3_<number>".

    trainer                                   peer i
    -------                                   ------
    RPCEngine(n, host, port)                  serve(i, host, port)
      joins as "trainer", opens the store <--   joins the group when it likes
    connect()  or  admit(i)          ----->   watches the trainer from now on
      watches the peer                 <---
    call(i, f, x)                    <---->   runs f(x)
    close()                          ----->   serve() returns

Either side watches the other with a call that never returns: it fails as soon as the connection
does, and takes no thread. A second, now and then, finds out what a broken connection does not
show: that a host is gone, or a cable. There is one RPC agent in a process, so there can be one
engine. The transport has no authentication, so everything binds to loopback unless told otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sync import interrupts
from sync.remote.addresses import LOOPBACK, address_towards, warn_if_exposed
from sync.remote.agent import (
    MemberLost,
    drop,
    join,
    newest_of,
    next_number,
    release_turn,
    strike_out,
    torch_rpc,
)
from sync.remote.engine import Engine, PeerDied
from sync.remote.inbox import hang_up
from sync.remote.store import free_port
from sync.remote.wire import Outcome, Post, pack, tell, unpack

_TRAINER = "trainer"
_LOOK_S = 0.01
_AGAIN_S = 0.1
_CLOSE_S = 2.0

_left = threading.Event()
_kept: dict[str, Any] = {}  # what members wait for that never comes, by their names


class RPCEngine(Engine):
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
        warn_if_exposed("torch.distributed.rpc", host, address or host)
        self.num_peers = num_peers
        self.timeout = timeout
        self.host, self.port = host, free_port(host, port)
        self._silence_s = silence_s
        self._names: dict[int, str] = {}
        self._gone: dict[int, str] = {}
        self._dead: set[str] = set()
        self._barred: list[str] = []  # which of the dead may keep others out of the group
        self._pending: dict[Future[Any], int] = {}
        self._closing = threading.Event()
        join(_TRAINER, 0, self.host, self.port, address or host, timeout)
        self._beat = threading.Thread(target=self._beats, name="lockstep-alive", daemon=True)
        self._beat.start()
        atexit.register(self.close)  # an agent that outlives the interpreter aborts it

    def connect(self, given_up: threading.Event | None = None) -> None:
        """Meet every peer that has not been met; `given_up` ends the wait for them."""
        missing = [peer for peer in range(self.num_peers) if peer not in self._names]
        self._meet(missing, given_up or threading.Event())

    def admit(self, peer: int, given_up: threading.Event | None = None) -> None:
        """Meet a peer that came late, or one that takes the place of a dead one."""
        self._meet([peer], given_up or threading.Event())

    def _meet(self, missing: list[int], given_up: threading.Event) -> None:
        deadline = time.monotonic() + self.timeout
        while missing and not given_up.wait(_LOOK_S):
            if self._dead:
                with contextlib.suppress(RuntimeError):  # `_forget` has noted why
                    strike_out(self._dead)  # as long as somebody may be joining
            for peer in list(missing):
                name = newest_of(peer)
                is_new = name is not None and name != self._names.get(peer)
                if name is not None and is_new and self._watch(peer, name):
                    missing.remove(peer)
            if missing and time.monotonic() > deadline:
                ids = ", ".join(map(str, missing))
                raise TimeoutError(
                    f"peer {ids} did not join at {self.host}:{self.port} within "
                    f"{self.timeout:g} s: was its process started, and does it call serve() with "
                    f"this host and port?{''.join(self._barred)}"
                )

    def _watch(self, peer: int, name: str) -> bool:
        """False if it has a name already, but no address yet."""
        try:
            watch = torch_rpc().rpc_async(name, _never, args=(_TRAINER,), timeout=0)
        except RuntimeError:
            return False
        self._gone.pop(peer, None)
        self._names[peer] = name
        watch.add_done_callback(lambda done: self._note(peer, name, _error(done)))
        return True

    def _note(self, peer: int, name: str, why: str | None) -> None:
        if why is not None and self._names.get(peer) == name and not self._closing.is_set():
            if peer in self._gone:
                return
            self._gone[peer] = why
            for future, whose in list(self._pending.items()):
                if whose == peer:
                    self._fail(future, peer, why)
            threading.Thread(target=self._forget, args=(peer, name), daemon=True).start()

    def _fail(self, future: Future[Any], peer: int, why: str) -> None:
        self._pending.pop(future, None)
        with contextlib.suppress(InvalidStateError):
            future.set_exception(PeerDied(f"{self.describe(peer)} is gone: {why}"))

    def _forget(self, peer: int, name: str) -> None:
        """Take a dead peer out of the group: nobody could join while it counts as a member."""
        self._dead.add(name)
        _kept.pop(name, None)  # with the memory of its connection
        steps = {"here": partial(drop, name), "in the store": partial(strike_out, [name])}
        for other in list(self._names):
            if other != peer and other not in self._gone:
                steps[f"at peer {other}"] = partial(self._have_forgotten, other, name)
        for where, step in steps.items():
            try:
                step()
            except Exception as error:  # noqa: BLE001 - told to whoever then waits for another
                self._barred.append(f" {name}, which died, is still a member {where}: {error!r}")

    def _have_forgotten(self, other: int, name: str) -> None:
        with contextlib.suppress(PeerDied):  # which is told elsewhere
            self.call(other, drop, name).result(_CLOSE_S)

    def _beats(self) -> None:
        while not self._closing.wait(self._silence_s / 4):
            for peer, name in list(self._names.items()):
                if peer not in self._gone:
                    _ask_for_life(name, self._silence_s, partial(self._note, peer, name))

    def call(self, peer: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        data, tensors = pack((function, args))
        return self._call(peer, _run, data, *tensors)

    def post(self, peer: int, function: Callable[..., Any], parcel: Any, *args: Any) -> Future[Any]:
        return self._call(peer, _run_post, Post(function, args).packed(), parcel)

    @interrupts.held()  # an answer that nobody hears of is waited for to the end
    def _call(self, peer: int, run: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._pending[future] = peer
        if (why := self.gone(peer)) is not None:
            self._fail(future, peer, why)
            return future
        name = self._names[peer]
        try:
            sent = torch_rpc().rpc_async(name, run, args=args, timeout=0)
        except RuntimeError as error:
            self._fail(future, peer, str(error).splitlines()[0])
            return future
        sent.add_done_callback(lambda done: self._hear(peer, name, done, future))
        return future

    def _hear(self, peer: int, name: str, done: Any, future: Future[Any]) -> None:
        if (why := _error(done)) is not None:
            self._note(peer, name, why)
            self._fail(future, peer, why)
            return
        self._pending.pop(future, None)
        data, *tensors = done.value()
        tell(future, data, tensors, self.describe(peer))

    def route(self, taker: int, giver: int) -> RPCRoute | None:
        return RPCRoute(self._names[giver]) if self.gone(giver) is None else None

    def gone(self, peer: int) -> str | None:
        if peer not in self._names:
            return "it was never met: call connect()"
        return self._gone.get(peer)

    def release(self, peer: int) -> None:
        release_turn(peer)

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
        torch_rpc().shutdown(graceful=False)
        _kept.clear()


class RPCRoute(NamedTuple):
    """A peer's way to another, by the name that the group knows it by."""

    name: str

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        packed = pack((function, args))
        sent = torch_rpc().rpc_async(
            self.name, _run, args=(packed.data, *packed.tensors), timeout=0
        )

        def hear(done: Any) -> None:
            if (why := _error(done)) is not None:
                future.set_exception(PeerDied(f"{self.name} is gone: {why}"))
            else:
                data, *tensors = done.value()
                tell(future, data, tensors, self.name)

        sent.add_done_callback(hear)
        return future


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
    number = next_number(peer, host, port, timeout)  # torch lets a process have only one
    address = address or address_towards(host, port)
    warn_if_exposed("torch.distributed.rpc", address)
    name = _join(peer, number, host, port, address, timeout)
    _left.clear()
    why: list[str] = []

    def end(error: str | None) -> None:
        if error is not None:
            why.append(f"the trainer is gone: {error}")
            _left.set()

    watch = torch_rpc().rpc_async(_TRAINER, _never, args=(name,), timeout=0)
    watch.add_done_callback(lambda done: end(_error(done)))
    while not _left.wait(silence_s / 4):
        _ask_for_life(_TRAINER, silence_s, end)
    said = why[0] if why else "it left"
    hang_up(f"the trainer at {host}:{port}: {said}")
    time.sleep(0.05)  # the answer to the call that said so must get out
    torch_rpc().shutdown(graceful=False)
    _kept.clear()
    return said


def _join(peer: int, number: int, host: str, port: int, address: str, timeout: float) -> str:
    """Join, again if it takes a moment until those who died are struck out; under which name."""
    deadline = time.monotonic() + timeout
    name = f"peer{peer}_{number}"
    while True:
        try:
            join(name, number, host, port, address, timeout)
            return name
        except MemberLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)


# -- what peers run


def _run(data: bytes, *tensors: Tensor) -> tuple[Any, ...]:
    packed = Outcome.of(_unpack_and_call, (data, tensors)).packed()
    return packed.data, *packed.tensors


def _run_post(data: bytes, block: Tensor) -> tuple[Any, ...]:
    packed = Outcome.of(Post.run, (data, block)).packed_plainly()
    return packed.data, *packed.tensors


def _unpack_and_call(data: bytes, tensors: tuple[Tensor, ...]) -> Any:
    function, args = unpack(data, tensors)
    return function(*args)


def _never(caller: str) -> Any:
    """A call that never returns, and takes no thread meanwhile."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    _kept[caller] = future
    return future


_never._wrapped_async_rpc_function = _never  # type: ignore[attr-defined]


def _alive() -> None:
    return None


def _leave() -> None:
    _left.set()


def _ask_for_life(name: str, within_s: float, tell: Callable[[str | None], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the watch has seen that connection break
        asked = torch_rpc().rpc_async(name, _alive, timeout=within_s)
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
