"""How the trainer and its peers meet: addresses, the trainer's TCPStore, and peers that join at any
time.

Everything binds to loopback unless told otherwise.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import threading
import time
import warnings
from abc import abstractmethod
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sync.remote.engine import Engine

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name counts as what it resolves to."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def warn_if_exposed(transport: str, *hosts: str) -> None:
    """One warning if others can reach one of them: whoever can connect can run code there."""
    exposed = [host for host in dict.fromkeys(hosts) if not is_loopback(host)]
    if exposed:
        warnings.warn(
            f"{transport} on {' and '.join(exposed)} has no authentication: whoever can reach it "
            "can run code as this user; keep it inside a network that you trust",
            stacklevel=4,
        )


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address."""
    try:
        wanted = socket.gethostbyname(address)
    except OSError as error:
        raise ValueError(f"address={address!r}: {str(error.strerror).lower()}") from None
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            names[socket.inet_ntoa(answer[20:24])] = name
    if wanted not in names:
        addresses = ", ".join(f"{at} ({name})" for at, name in names.items())
        raise ValueError(f"address={address!r} is not of this machine, which has {addresses}")
    return names[wanted]


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


_LOOK_S = 0.01


def open_store(host: str, port: int, timeout: float) -> Any:
    """A store that listens at `host` alone; torch's own default is every interface.

    port: 0 takes a free one; `store.port` tells which.
    """
    try:
        listener = socket.create_server((socket.gethostbyname(host), port), backlog=128)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "the port is taken" if taken else str(error.strerror or error).lower()
        raise ConnectionError(f"no store can be opened at {host}:{port}: {why}") from None
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store owns the socket from here on, and closes it
    limit = timedelta(seconds=timeout)
    try:
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:  # this process is too busy to answer itself, say
        why = str(error).splitlines()[0]
        raise ConnectionError(f"no store can be opened at {host}:{port}: {why}") from None


def find_store(host: str, port: int, timeout: float, peer: int) -> Any:
    """The trainer's store, as peer number `peer` sees it, within `timeout`."""
    deadline, why = time.monotonic() + timeout, "there was no time"
    while (left := deadline - time.monotonic()) > 0:
        # torch would retry too, and print a page of warnings each time it fails.
        try:
            socket.create_connection((host, port), timeout=left).close()
            break
        except OSError as error:
            why = str(error.strerror or error).lower()
        time.sleep(_LOOK_S)
    else:
        raise ConnectionError(
            f"peer {peer}: no trainer answered at {host}:{port} within {timeout:g} s ({why}); is "
            "that its address, and did it open its engine?"
        )
    left = max(1.0, deadline - time.monotonic())
    opened: Future[Any] = Future()

    def open_it() -> None:
        try:
            limit = timedelta(seconds=left)
            opened.set_result(TCPStore(host, port, is_master=False, timeout=limit))
        except RuntimeError as error:
            opened.set_exception(error)

    # torch waits for the first answer without a limit, whatever its timeout.
    threading.Thread(target=open_it, name="lockstep-store", daemon=True).start()
    try:
        return opened.result(left)
    except (RuntimeError, TimeoutError) as error:
        said = str(error).splitlines()
        why = f" ({said[0]})" if said else ""
        raise ConnectionError(
            f"peer {peer}: the process that listens at {host}:{port} did not answer as a trainer "
            f"does within {timeout:g} s{why}; is that its address and port?"
        ) from None


class JoiningEngine(Engine):
    """The trainer's side.

    host, port: where peers find the trainer's store; port 0 takes a free one, see `port`.
    address: what this process's own connections bind to; `host` unless told.
    timeout: seconds that `connect` and `admit` wait.
    silence_s: seconds without a sign of life after which a peer counts as gone.
    """

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
        warn_if_exposed(self.mechanism, host, address or host)
        self.num_peers = num_peers
        self.timeout = timeout
        self._silence_s = silence_s
        self._address = address or host
        self._names: dict[int, str] = {}  # of the peers that were met
        self._store = open_store(host, port, timeout)
        self.host, self.port = host, self._store.port

    def connect(self, given_up: threading.Event | None = None) -> None:
        """Meet every peer that was not met yet; setting `given_up` ends the wait."""
        missing = [peer for peer in range(self.num_peers) if peer not in self._names]
        self._meet_all(missing, given_up or threading.Event())

    def admit(self, peer: int, given_up: threading.Event | None = None) -> None:
        """Meet a peer that came late, or one that takes the place of a dead one."""
        self._meet_all([peer], given_up or threading.Event())

    def _meet_all(self, missing: list[int], given_up: threading.Event) -> None:
        deadline = time.monotonic() + self.timeout
        while missing := [peer for peer in missing if not self._meet(peer, deadline)]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"peer {', '.join(map(str, missing))} did not join at {self.host}:{self.port} "
                    f"within {self.timeout:g} s: was its process started, and does it call serve() "
                    f"with this host and port?"
                )
            if given_up.wait(_LOOK_S):
                return

    @abstractmethod
    def _meet(self, peer: int, deadline: float) -> bool:
        """Meet the peer, if it came and was not met yet."""
