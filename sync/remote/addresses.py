"""Where a process can be reached: loopback unless told otherwise, and what that exposes."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import threading
import warnings
from collections.abc import Iterator

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
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            found[socket.inet_ntoa(answer[20:24])] = name
    if wanted not in found:
        own = ", ".join(f"{at} ({name})" for at, name in found.items())
        raise ValueError(f"address={address!r} is not of this machine, which has {own}")
    return found[wanted]


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


_in_use: dict[str, tuple[str, int, str | None]] = {}  # variable: interface, users, value before
_changed = threading.Condition()


@contextlib.contextmanager
def uses_interface(variable: str, name: str) -> Iterator[None]:
    """Have what reads this environment variable use the network interface `name`.

    All threads share the environment, and both sides of a connection may be made in one process:
    threads with the same interface do not exclude each other.
    """
    with _changed:
        _changed.wait_for(lambda: variable not in _in_use or _in_use[variable][0] == name)
        _, users, before = _in_use.get(variable, (name, 0, os.environ.get(variable)))
        _in_use[variable] = name, users + 1, before
        os.environ[variable] = name
    try:
        yield
    finally:
        with _changed:
            _, users, before = _in_use.pop(variable)
            if users > 1:
                _in_use[variable] = name, users - 1, before
            elif before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before
            _changed.notify_all()
