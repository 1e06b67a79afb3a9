"""Objects sent over a socket of this machine, with the file descriptors that are in them.

multiprocessing passes descriptors to the processes that it starts itself. These go to any process.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any

_HEAD = struct.Struct("<2q")  # bytes of the pickle, number of descriptors
_MOST_FDS = 64
_FD_BYTES = array.array("i").itemsize


class _OnTheWay(threading.local):
    """The descriptors that go, or came, with what this thread pickles or unpickles."""

    fds: list[int] | None = None


_on_the_way = _OnTheWay()


class _Place:
    """Stands for a descriptor that is sent beside the pickle."""

    def __init__(self, number: int):
        self.number = number

    def detach(self) -> int:
        fds = _on_the_way.fds
        assert fds is not None
        fd, fds[self.number] = fds[self.number], -1
        return fd


def travelling(fd: int) -> Any:
    """What to pickle instead of a descriptor; its `detach()` gives one in the other process."""
    fds = _on_the_way.fds
    if fds is None:
        return DupFd(fd)
    fds.append(fd)
    return _Place(len(fds) - 1)


@contextmanager
def _with_fds(fds: list[int]) -> Iterator[None]:
    before, _on_the_way.fds = _on_the_way.fds, fds
    try:
        yield
    finally:
        _on_the_way.fds = before


def send(connection: socket.socket, thing: Any) -> None:
    """Pickle `thing` over a Unix socket."""
    fds: list[int] = []
    with _with_fds(fds):
        data = pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
    socket.send_fds(connection, [_HEAD.pack(len(data), len(fds))], fds)
    connection.sendall(data)


def receive(connection: socket.socket) -> Any:
    """What the other side sends; an `OSError` if it does not come whole."""
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    # Not `socket.recv_fds`, which drops the flags that it is given.
    room = socket.CMSG_SPACE(_MOST_FDS * _FD_BYTES)
    head, beside, _, _ = connection.recvmsg(_HEAD.size, room, flags)
    fds: list[int] = []
    for level, kind, numbers in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += array.array("i", numbers[: len(numbers) - len(numbers) % _FD_BYTES])
    try:
        length, num_fds = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, -1)
        data = bytearray()
        while len(data) < length and (part := connection.recv(length - len(data))):
            data += part
        if len(data) < length or len(fds) != num_fds:  # fewer where there was no room for more
            raise ConnectionError("the other side ended, or no descriptors are left here")
        with _with_fds(fds):
            return pickle.loads(data)
    finally:
        for fd in fds:
            if fd >= 0:  # nobody took it
                os.close(fd)
