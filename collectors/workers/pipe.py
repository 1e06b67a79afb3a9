"""A two-way pipe for messages between the trainer and one worker.

Only complete messages are received. If a process dies in the middle of one, it is dropped, and no
call waits for the rest.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, Self

import cloudpickle

from sync.local.memory import SharedFd
from sync.local.waiting import awake_s

_HEADER = struct.Struct("Q")


class PipeClosed(ConnectionError):
    """The other end is closed."""


class Pipe(SharedFd):
    """One end. It can be passed to a child process when that is started."""

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Two ends, joined."""
        near, far = socket.socketpair()
        return cls(near.detach()), cls(far.detach())

    def _open(self, fd: int) -> Callable[[], object]:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._buffer = bytearray()
        self.ended = False  # the other end is closed, and all that it sent was received
        self._is_cut = False  # a part of a message was sent: no other one can follow
        return self._socket.close

    def send(self, message: Any, *, timeout: float = 60.0) -> None:
        """Send one message. `PipeClosed` if the other end is closed, `TimeoutError` if unread."""
        if self._is_cut:
            raise PipeClosed("a message was sent in part only")
        payload = dumps(message)
        data = memoryview(_HEADER.pack(len(payload)) + payload)
        deadline = awake_s() + timeout
        while data:
            try:
                data = data[self._socket.send(data) :]
                self._is_cut = bool(data)  # until all of it is sent
            except BlockingIOError:
                if awake_s() > deadline:
                    raise TimeoutError(f"a message was not read within {timeout:g} s") from None
                _wait_until_writable(self._socket, 0.05)
            except (BrokenPipeError, ConnectionResetError):
                raise PipeClosed("the other end is closed") from None

    def receive(self) -> list[Any]:
        """All messages that have come. Never waits."""
        while not self.ended:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self._buffer += data
            self.ended = not data
        return self._complete()

    def _complete(self) -> list[Any]:
        messages = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer, start)
            end = start + _HEADER.size + size
            if end > len(self._buffer):
                break
            with memoryview(self._buffer) as view:
                messages.append(pickle.loads(view[start + _HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return messages


def dumps(message: Any) -> bytes:
    """The message as bytes for `pickle.loads`; also lambdas and local classes."""
    try:
        return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        data: bytes = cloudpickle.dumps(message)
        return data


def _wait_until_writable(sock: socket.socket, timeout: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    poll.poll(timeout * 1000)
