"""Workers on the trainer's own machine: they are handed its memory, and need no engine for weights.

    trainer                                        worker
    -------                                        ------
    Counter: a socket without a file          <--  ask(address, worker)
    of this user, and what it says it is?
    slots, the worker's row, bells            -->  the trainer, and nobody else?
                                                   a transport as `shared_mem.py` has it

Who cannot reach the socket (another machine, another network namespace), or sees other process
numbers or users than the trainer does, is elsewhere: versions come to it over the engine.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from sync import passing

_PATIENCE_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_REQUEST = struct.Struct("<32s2q")  # secret, process, worker

# Sockets with names in no file system, whose other end the kernel can tell.
POSSIBLE = sys.platform == "linux" and hasattr(socket, "SO_PEERCRED")


class Address(NamedTuple):
    """Where a trainer is asked, by those who were told."""

    name: str
    pid: int
    secret: bytes


class Counter:
    """Hands a worker what `give(worker)` returns, from a thread of its own.

    Nobody but processes of the same user that know the secret are given anything.
    """

    def __init__(self, give: Callable[[int], Any]):
        self._give = give
        self.address = Address(
            f"lockstep-{secrets.token_hex(16)}", os.getpid(), secrets.token_bytes(32)
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address.name}")
        self._socket.listen(socket.SOMAXCONN)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-near", daemon=True)

    def open(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
                # Whoever asks and then is silent must not keep others waiting.
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no descriptors or no threads are left, or
                if self._closed.wait(0.1):
                    return

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # who asked is gone, or gives up
            pid, user = _other_end(connection)
            if user != os.geteuid():
                return
            connection.settimeout(_PATIENCE_S)
            request = connection.recv(_REQUEST.size)
            if len(request) != _REQUEST.size:
                return
            secret, claimed, worker = _REQUEST.unpack(request)
            if hmac.compare_digest(secret, self.address.secret) and claimed == pid:
                passing.send(connection, self._give(worker))

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait for the next
        self._socket.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)


def ask(address: Address, worker: int) -> Any:
    """What the trainer has for this worker; None if it is not on this machine."""
    if not POSSIBLE:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(f"\0{address.name}")
            if _other_end(connection) != (address.pid, os.geteuid()):
                return None
            connection.sendall(_REQUEST.pack(address.secret, os.getpid(), worker))
            return passing.receive(connection)
        except OSError:
            return None


def _other_end(connection: socket.socket) -> tuple[int, int]:
    """The process and the user there, as this process would call them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user
