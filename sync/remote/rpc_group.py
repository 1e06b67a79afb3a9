"""The one RPC agent of torch in this process, and how it joins a group.

torch has no public way to bind its store to one address, nor to give up joining. This module uses
what is not public:

- `rpc._init_counter`, which names the group in the store (`rpc_prefix_0`);
- `rpc.api.shutdown`, replaced while `init_rpc` runs;
- the store's key `names/_ALL_WORKER_INFOS`, which is there once the trainer has joined;
- `_transports` and `_channels` of `TensorPipeRpcBackendOptions`.

`tests/sync/remote/test_rpc_group.py` fails when one of them changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from functools import cache, partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed import rpc

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
_MEMBERS = "names/_ALL_WORKER_INFOS"  # who is in the group
_stores: dict[str, Any] = {}  # the store with which a member of this name joins


def join(name: str, number: int, store: Any, address: str, timeout: float) -> None:
    """Be the member `name` of the group whose members meet in `store`."""
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
    shutdown = rpc.api.shutdown
    # A process that does not reach a member leaves: torch's own way waits for it to have joined.
    rpc.api.shutdown = partial(shutdown, graceful=False)
    os.environ[_INTERFACE] = interface
    try:
        rpc.init_rpc(name, rank=number, world_size=None, rpc_backend_options=options)
    except RuntimeError as error:
        raise ConnectionError(
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
        return str(rpc.get_worker_info().name)
    except RuntimeError:  # there is no agent
        return ""


@cache
def _register() -> None:
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(_SCHEME, _rendezvous)


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """How `init_rpc` gets its store: torch's own way opens one on every interface."""
    address = urlsplit(url)
    yield _stores[address.netloc], int(parse_qs(address.query)["rank"][0]), -1


def name_of(peer: int) -> str:
    """What the group calls this peer."""
    return f"peer{peer}"


def await_group(store: Any, peer: int, timeout: float) -> None:
    """Wait until the trainer has opened the group, and let it know that this peer joins."""
    try:
        store.wait([f"{_GROUP}/{_MEMBERS}"], timedelta(seconds=timeout))
    except RuntimeError:
        raise ConnectionError(
            f"peer {peer}: the process at {store.host}:{store.port} opened no RPC group within "
            f"{timeout:g} s"
        ) from None
    store.set(_came(peer), "")


def has_come(store: Any, peer: int) -> bool:
    """Whether this peer has joined, or is joining."""
    return bool(store.check([_came(peer)]))


def _came(peer: int) -> str:
    return f"lockstep/peer/{peer}"
