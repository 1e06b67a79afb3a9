"""The one RPC agent of torch in this process: how it joins a group, and who is a member.

torch has no public way to replace a member that died, nor to bind its store to one address. This
module uses what is not public:

- `rpc._init_counter`, which names the group in the store (`rpc_prefix_0`);
- `rpc.api.shutdown`, replaced while `init_rpc` runs;
- the store's keys `names/_ALL_WORKER_INFOS` (the members, as "name-rank,"),
  `RpcGroupManagementToken` (whose turn it is to join) and `Token_for_<name>_join`;
- `_transports` and `_channels` of `TensorPipeRpcBackendOptions`.

`tests/sync/remote/test_rpc_group.py` fails when one of them changes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from datetime import timedelta
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from sync.remote.addresses_and_stores import interface_of, is_loopback

_SCHEME = "lockstep"
_INTERFACE = "TP_SOCKET_IFNAME"  # the environment variable that tells TensorPipe which to use
# Among processes of one machine nothing but the store listens on a port: unexpected bytes end a
# process that listens for TensorPipe over TCP.
_ONE_MACHINE: dict[str, Any] = {"_transports": ["shm"], "_channels": ["basic"]}
# Between machines TensorPipe chooses. Two processes of one machine then copy from memory to memory,
# whatever their addresses; tests whose hosts are namespaces forbid that.
BETWEEN_MACHINES: dict[str, Any] = {}
_GROUP = "rpc_prefix_0"  # the prefix of torch's keys in the store
_WHOSE_TURN = "RpcGroupManagementToken"  # who is joining: one member at a time
_MEMBERS = "names/_ALL_WORKER_INFOS"  # who is in the group
_stores: dict[str, Any] = {}  # the store with which a member of this name joins


def torch_rpc() -> Any:
    """The module; it is loaded where it is used."""
    from torch.distributed import rpc

    return rpc


def remove_members(store: Any, names: Collection[str]) -> None:
    """Remove these from the members in the store, which whoever joins connects to.

    A process that is just joining may write back what it read before.
    """
    group = PrefixStore(_GROUP, store)
    while True:
        members = group.get(_MEMBERS).decode()
        kept = "".join(
            f"{member},"
            for member in members.split(",")
            if member and member.rpartition("-")[0] not in names
        )
        if kept == members or group.compare_set(_MEMBERS, members, kept).decode() == kept:
            return


class MemberLost(ConnectionError):
    """A member could not be reached. Joining works once the dead ones are removed."""


def join(name: str, number: int, store: Any, address: str, timeout: float) -> None:
    """Be the member `name` of the group whose members meet in `store`."""
    rpc = torch_rpc()
    if already := _own_name():
        raise RuntimeError(
            f"this process is in an RPC group already, as {already!r}; there can be one at a time"
        )
    _register()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://{name}",
        rpc_timeout=timeout,
        num_worker_threads=32,
        **(_ONE_MACHINE if is_loopback(store.host) else BETWEEN_MACHINES),
    )
    interface, before = interface_of(address), os.environ.get(_INTERFACE)
    _stores[name] = store
    rpc._init_counter = 0  # both sides must name the group alike
    lost = False
    shutdown = rpc.api.shutdown

    def leave_at_once() -> None:
        nonlocal lost
        lost = True
        shutdown(graceful=False)

    # A process that does not reach a member leaves: torch's own way waits for it to have joined.
    rpc.api.shutdown = leave_at_once
    os.environ[_INTERFACE] = interface
    try:
        rpc.init_rpc(name, rank=number, world_size=None, rpc_backend_options=options)
    except RuntimeError as error:
        if lost:
            _step_back(name, store)
        raise (MemberLost if lost else ConnectionError)(
            f"{name} could not join the group at {store.host}:{store.port} within {timeout:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from None
    finally:
        rpc.api.shutdown = shutdown
        del _stores[name]
        if before is None:
            del os.environ[_INTERFACE]
        else:
            os.environ[_INTERFACE] = before


def _own_name() -> str:
    try:
        return str(torch_rpc().get_worker_info().name)
    except RuntimeError:  # there is no agent
        return ""


def _step_back(name: str, store: Any) -> None:
    """Remove a member that could not join: its name, and its turn to join."""
    remove_members(store, [name])
    group, turn = PrefixStore(_GROUP, store), f"Token_for_{name}_join"
    group.compare_set(_WHOSE_TURN, turn, "")
    group.set(turn, "Done")  # the others wait for this


def release_turn(store: Any, peer: int) -> None:
    """If it is this peer's turn to join, and its process has ended, let others join."""
    turn = PrefixStore(_GROUP, store).get(_WHOSE_TURN).decode()
    if found := re.fullmatch(rf"Token_for_(peer{peer}_\d+)_join", turn):
        _step_back(found[1], store)


@cache
def _register() -> None:
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(_SCHEME, _rendezvous)


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """How `init_rpc` gets its store: torch's own way opens one on every interface."""
    found = urlsplit(url)
    yield _stores[found.netloc], int(parse_qs(found.query)["rank"][0]), -1


def next_name(store: Any, peer: int, timeout: float) -> tuple[str, int]:
    """A name and a number that no member of the group had before, once the trainer has joined."""
    try:
        store.wait([f"{_GROUP}/{_MEMBERS}"], timedelta(seconds=timeout))
    except RuntimeError:
        raise ConnectionError(
            f"peer {peer}: the process at {store.host}:{store.port} opened no RPC group within "
            f"{timeout:g} s"
        ) from None
    number = int(store.add("lockstep/peers", 1))
    name = f"peer{peer}_{number}"
    store.set(_newest(peer), name)
    return name, number


def newest_member(store: Any, peer: int) -> str:
    """The name with which this peer joined last, or is joining; empty if it never did."""
    return str(store.get(_newest(peer)).decode()) if store.check([_newest(peer)]) else ""


def _newest(peer: int) -> str:
    return f"lockstep/peer/{peer}"
