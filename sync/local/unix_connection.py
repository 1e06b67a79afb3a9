"""How a worker's process finds its sender on this machine, and the connection between them.

    sender                                          worker
    ------                                          ------
    Listener: a Unix socket      address  --->      (travels with the pickled scheme)
    accept()                     <--- HELLO         connect(address, worker)
    WELCOME, with descriptors    --->               maps the memory
      or REFUSED, with the reason

The address is plain data, so a scheme can be pickled any number of times and in any way. The socket
is in the abstract namespace: it has no file and disappears with its process. Only processes of the
same user that know the address and its secret are accepted. Each side asks the kernel for the
number of the other's process.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from sync.local.waiting import Watch

HELLO, WELCOME, REFUSED, VERSION, WAKE, CLOSE, DONE, FAIL, LEAVE = range(9)

_HEAD = struct.Struct("<i6q")  # kind, numbers; text follows
_NUMBERS = 6
TEXT_BYTES = 16 * 1024
_READ_BYTES = _HEAD.size + TEXT_BYTES
MOST_FDS = 8
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_BACKLOG = 1024
_CONNECT_S = 10.0


class Address(NamedTuple):
    """Where a sender listens, and the secret that a worker has to present."""

    name: str
    secret: str


class Message(NamedTuple):
    """A kind, a few numbers, and text for a traceback or a reason."""

    kind: int
    numbers: tuple[int, ...]
    text: str


class Listener:
    """The sender's socket, to which workers connect at any time."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"\0lockstep-{secrets.token_hex(16)}"
        self._socket.bind(name)
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._reserve = self._socket.dup()  # a descriptor to refuse a process with
        self.fd = self._socket.fileno()
        self.address = Address(name, secrets.token_hex(16))

    def accept(self) -> list[Connection]:
        """New connections that have not sent HELLO yet."""
        accepted: list[Connection] = []
        while True:
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                return accepted
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._refuse_one(str(error.strerror).lower())
                return accepted
            if _credentials(connected)[1] == os.geteuid():
                accepted.append(Connection(connected))
            else:
                connected.close()

    def _refuse_one(self, why: str) -> None:
        """No descriptor is left for a connection: say so, and leave nobody waiting."""
        self._reserve.close()
        with contextlib.suppress(OSError):
            connected, _ = self._socket.accept()
            refused = Connection(connected)
            refused.send(REFUSED, text=f"the sender cannot accept it: {why}")
            refused.close()
        with contextlib.suppress(OSError):  # another thread may have taken the descriptor
            self._reserve = self._socket.dup()

    def is_known(self, hello: Message) -> bool:
        """Whether the process that sent this knows the secret of the address."""
        secret, said = self.address.secret.encode(), hello.text.encode(errors="replace")
        return hello.kind == HELLO and hmac.compare_digest(said, secret)

    def close(self) -> None:
        self._socket.close()
        self._reserve.close()


def connect(address: Address, worker: int) -> Connection:
    """Connect to the sender as this worker; `ConnectionError` if no sender listens there."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.settimeout(_CONNECT_S)
        connected.connect(address.name)
    except OSError as error:
        connected.close()
        raise ConnectionError(f"the sender is gone ({error})") from None
    connection = Connection(connected)
    connection.send(HELLO, worker, text=address.secret)
    return connection


class Connection:
    """Small messages in both directions. It never blocks and pickles nothing.

    pid: the number of the process on the other side; 0 if its PID namespace hides it.
    process: tells whether that process is gone, once `watch` was called.
    ended: the other side closed the connection, or its process ended.
    has_left: the other side said that it leaves.
    """

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        self._socket = connected
        self.pid = _credentials(connected)[0]
        self.process = Watch(0)
        self.ended = self.has_left = False
        self.fds: list[int] = []  # those received

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def watch(self) -> None:
        """Notice the end of the other side's process; `OSError` if no descriptor is left."""
        self.process = Watch(self.pid)

    def send(self, kind: int, *numbers: int, text: str = "", fds: Sequence[int] = ()) -> None:
        """Send at once. A message is dropped if either side has closed the connection.

        Only a few messages are unread at a time, for which a socket has room. If a process is
        suspended and there is no room, the message is dropped, too.
        """
        if self.fd < 0:
            return
        data = text.encode(errors="backslashreplace")[-TEXT_BYTES:]
        padded = numbers + (0,) * (_NUMBERS - len(numbers))
        message = _HEAD.pack(kind, *padded) + data
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            if fds:
                socket.send_fds(self._socket, [message], fds)
            else:
                self._socket.send(message)

    def receive(self, most_fds: int = 0) -> list[Message]:
        """The messages that have arrived, whose descriptors are added to `fds`."""
        messages = []
        while not self.ended:
            try:
                if most_fds:
                    data, fds, _, _ = socket.recv_fds(self._socket, _READ_BYTES, most_fds)
                    for fd in fds:
                        os.set_inheritable(fd, False)
                    self.fds += fds
                else:
                    data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:  # it is raised once, and what had arrived can be read then
                continue
            if len(data) < _HEAD.size:  # empty at the end; else it does not speak this protocol
                self.ended = True
                break
            kind, *numbers = _HEAD.unpack_from(data)
            text = data[_HEAD.size :].decode(errors="replace")
            messages.append(Message(kind, tuple(numbers), text))
            self.has_left |= kind == LEAVE
        return messages

    def close(self) -> None:
        self._socket.close()
        self.process.close()


def _credentials(connected: socket.socket) -> tuple[int, int]:
    """The process and the user on the other side, as the kernel recorded them."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user
