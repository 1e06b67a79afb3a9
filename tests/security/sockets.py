"""What the processes of a run listen on, as the kernel says."""

from __future__ import annotations

import os
import socket
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple

import psutil

TABLES = ("tcp", "tcp6", "udp", "udp6")
LISTENS, UNCONNECTED = "0A", "07"


class Listener(NamedTuple):
    """One socket that strangers could reach."""

    kind: str
    address: str
    port: int
    command: str

    @property
    def is_loopback(self) -> bool:
        return self.address in ("::1", "::ffff:127.0.0.1") or self.address.startswith("127.")


def listeners(pid: int) -> set[Listener]:
    """All of a process and its descendants."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {found for process in family for found in _of(process)}


def _of(process: psutil.Process) -> list[Listener]:
    try:
        owned = _socket_inodes(process.pid)
        command = " ".join(process.cmdline())[:200]
        lines = [
            (kind, line.split())
            for kind in TABLES
            for line in Path(f"/proc/{process.pid}/net/{kind}").read_text().splitlines()[1:]
        ]
    except (OSError, psutil.NoSuchProcess):  # it ended meanwhile
        return []
    return [
        Listener(kind, *_place(fields[1]), command)
        for kind, fields in lines
        if fields[9] in owned and fields[3] == (LISTENS if "tcp" in kind else UNCONNECTED)
    ]


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _place(text: str) -> tuple[str, int]:
    """An address as /proc has it: words of the machine's own byte order."""
    address, port = text.split(":")
    raw = bytes.fromhex(address)
    words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    kind = IPv4Address if len(words) == 4 else IPv6Address
    return str(kind(words)), int(port, 16)


def strangers(listener: Listener) -> list[socket.socket]:
    """Three of them: one says nothing, one talks nonsense, one hangs up half-way."""
    family = socket.AF_INET6 if ":" in listener.address else socket.AF_INET
    found = []
    for number in range(3):
        stranger = socket.socket(family, socket.SOCK_STREAM)
        stranger.settimeout(5)
        stranger.connect((listener.address, listener.port))
        if number:
            stranger.sendall(bytes(range(256)) * 16 if number == 1 else b"\x80\x04\x95")
        if number == 2:
            stranger.shutdown(socket.SHUT_WR)
        found.append(stranger)
    return found
