"""Where a process can be reached: loopback unless told otherwise, and what that exposes."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import warnings

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
