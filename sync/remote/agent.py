"""The one RPC agent of torch in this process: how it joins a group, and who is in it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from datetime import timedelta
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from sync.remote.addresses import interface_of, is_loopback
from sync.remote.store import find_store, open_store

_SCHEME = "lockstep"
# Among processes of one machine nothing but the store listens on a port: stray bytes end a process
# that listens for TensorPipe over TCP.
_ONE_MACHINE: dict[str, Any] = {"_transports": ["shm"], "_channels": ["basic"]}
# Elsewhere TensorPipe chooses among all it knows. Whatever their addresses, two processes of one
# machine then copy from memory to memory; hosts that are namespaces of one machine must not.
BETWEEN_MACHINES: dict[str, Any] = {}
_GROUP = "rpc_prefix_0"  # what torch's keys in the store begin with
_WHOSE_TURN = "RpcGroupManagementToken"  # where it keeps who is joining: one at a time
_MEMBERS = "names/_ALL_WORKER_INFOS"  # where torch keeps who is in the group


def torch_rpc() -> Any:
    """The module, which is loaded where it is used."""
    from torch.distributed import rpc

    return rpc


def _agent() -> Any:
    return torch_rpc().api._get_current_rpc_agent()


def _members() -> Iterator[str]:
    return (info.name for info in _agent().get_worker_infos())


def newest_of(peer: int) -> str | None:
    """The name of the member that joined last as this peer."""
    names = [name for name in _members() if name.startswith(f"peer{peer}_")]
    return max(names, key=lambda name: int(name.partition("_")[2]), default=None)


def drop(name: str) -> None:
    """Count `name` as a member of the group no more."""
    from torch.distributed.rpc._utils import _update_group_membership

    for info in _agent().get_worker_infos():
        if info.name == name:
            _update_group_membership(info, [], {}, False)


def strike_out(names: Collection[str], store: Any = None) -> None:
    """Have nobody who joins from now on be told of these members.

    Who is just joining may write down again what it read before.
    """
    store = _agent().store if store is None else store
    while True:
        members = store.get(_MEMBERS).decode()
        kept = "".join(
            f"{member},"
            for member in members.split(",")
            if member and member.rpartition("-")[0] not in names
        )
        if kept == members or store.compare_set(_MEMBERS, members, kept).decode() == kept:
            return


class MemberLost(ConnectionError):
    """Who is in the group could not be reached. Once the dead are struck out, joining may do."""


def join(name: str, number: int, host: str, port: int, address: str, timeout: float) -> None:
    """Be the member `name` of the group at `host:port`."""
    rpc = torch_rpc()
    if rpc.api._is_current_rpc_agent_set():
        raise RuntimeError(
            f"this process is in an RPC group already, as {_agent().get_worker_info().name!r}; "
            "there can be one at a time"
        )
    _register()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://{host}:{port}?timeout={timeout}",
        rpc_timeout=timeout,
        num_worker_threads=32,
        **(_ONE_MACHINE if is_loopback(host) else BETWEEN_MACHINES),
    )
    before = os.environ.get("TP_SOCKET_IFNAME")
    os.environ["TP_SOCKET_IFNAME"] = interface_of(address)
    rpc._init_counter = 0  # it names the group in the store, and both sides must name it alike
    lost = False
    shutdown = rpc.api.shutdown

    def leave_at_once() -> None:
        nonlocal lost
        lost = True
        shutdown(graceful=False)

    # Who does not reach a member leaves: in torch's way it would wait for itself to have joined.
    rpc.api.shutdown = leave_at_once
    try:
        rpc.init_rpc(name, rank=number, world_size=None, rpc_backend_options=options)
    except RuntimeError as error:
        if lost:
            _step_back(name, PrefixStore(_GROUP, find_store(host, port, timeout, number - 1)))
        raise (MemberLost if lost else ConnectionError)(
            f"{name} could not join the group at {host}:{port} within {timeout:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from None
    finally:
        rpc.api.shutdown = shutdown
        os.environ.pop("TP_SOCKET_IFNAME")
        if before is not None:
            os.environ["TP_SOCKET_IFNAME"] = before


def _step_back(name: str, store: Any) -> None:
    """Leave nothing of a member that did not get in: not its name, nor its turn to join."""
    strike_out([name], store)
    turn = f"Token_for_{name}_join"
    store.compare_set(_WHOSE_TURN, turn, "")
    store.set(turn, "Done")  # others wait for this


def release_turn(peer: int) -> None:
    """If it is the turn of this peer to join, whose process has ended, let others have theirs."""
    store = _agent().store
    turn = re.fullmatch(rf"Token_for_(peer{peer}_\d+)_join", store.get(_WHOSE_TURN).decode())
    if turn is not None:
        _step_back(turn[1], store)


@cache
def _register() -> None:
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(_SCHEME, _rendezvous)


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """How `init_rpc` comes to the store: torch's own way would open it on every interface."""
    place = urlsplit(url)
    query = parse_qs(place.query)
    host, port, rank = str(place.hostname), int(place.port or 0), int(query["rank"][0])
    timeout = float(query["timeout"][0])
    opens = rank == 0
    store = open_store(host, port, timeout) if opens else find_store(host, port, timeout, rank - 1)
    yield store, rank, -1


def next_number(peer: int, host: str, port: int, timeout: float) -> int:
    """A number that no member of the group had before; and so the trainer is known to be there."""
    store = find_store(host, port, timeout, peer)
    limit = timedelta(seconds=timeout)
    try:
        store.wait([f"{_GROUP}/{_MEMBERS}"], limit)  # the trainer has joined
    except RuntimeError:
        raise ConnectionError(
            f"peer {peer}: whoever answers at {host}:{port} opened no RPC group within "
            f"{timeout:g} s"
        ) from None
    return int(store.add("lockstep/peers", 1))
