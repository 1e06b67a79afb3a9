"""A two-way line for small messages between a sender and one worker.

A socket pair that keeps message borders. Each message is a kind and a few 64-bit numbers, with text
behind it for a traceback; nothing is pickled. Both ends stay with the sender, so that a worker that
took a dead one's place can be handed the same line. Every message has the time in it, and when an
end put its last one is in a word of shared memory: the other can look without a system call.

Two more words are of versions that need no message (`home.py`): the worker's says whether its
model rests, the sender's which version it put into that model last.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any, NamedTuple

from sync.memory import AnonymousMemory, Order, SharedFd, as_bytes, wait_for

SNAPSHOT, CLOSE, GREET, DONE, FAIL, LEAVE = range(6)
TEXT_BYTES = 16 * 1024
_NUMBERS = 5
_FORMAT = struct.Struct(f"{2 + _NUMBERS}q")
_WORDS_BYTES = 32
_HOME, _BROUGHT = 2, 3  # behind the times of the last messages


class Message(NamedTuple):
    """What came over the line."""

    kind: int
    numbers: tuple[int, ...]
    text: str


class Channel:
    """The line. `put` and `get` work at the sender's end until `turn_around` is called."""

    def __init__(self) -> None:
        kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
        near, far = socket.socketpair(socket.AF_UNIX, kind)
        near.setblocking(False)
        far.setblocking(False)
        self._near, self._far = SharedFd(near.detach()), SharedFd(far.detach())
        self._kind = int(kind)
        self._memory = AnonymousMemory(_WORDS_BYTES)
        self._order = Order(self._memory)
        self._ours, self._theirs = 0, 1
        self._turned_in = 0
        self._peeked = self._taken = 0
        self._open()

    def _open(self) -> None:
        # Kept before it has the descriptor, which it would close if an interrupt let go of it.
        self._socket = socket.socket.__new__(socket.socket)
        self._socket.__init__(socket.AF_UNIX, self._kind, 0, self._near.fd)  # type: ignore[misc]
        memory = self._memory.map(0, _WORDS_BYTES, writable=True)
        self._words = as_bytes(memory).cast("q")

    @property
    def fd(self) -> int:
        return self._near.fd

    def has_mail(self) -> bool:
        """Whether there may be a message; one that was put this instant may not show yet."""
        return self._words[self._theirs] > self._taken

    @property
    def home(self) -> int:
        """Whether the worker's model is where the sender may write it, and rests."""
        return self._words[_HOME]

    def tell_home(self, what: int) -> None:
        self._words[_HOME] = what
        self._order()  # who moves out reads the sender's word afterwards

    @property
    def brought(self) -> int:
        """The version that the sender put there last, or began to, and its slot; 0: none yet."""
        return self._words[_BROUGHT]

    def tell_brought(self, word: int) -> None:
        self._words[_BROUGHT] = word
        self._order()  # and the sender looks afterwards whether it has

    def put(self, kind: int, *numbers: int, text: str = "") -> bool:
        """Send at once; False if the other side has not read for so long that there is no room."""
        padded = numbers + (0,) * (_NUMBERS - len(numbers))
        now = time.perf_counter_ns()
        try:
            self._socket.send(_FORMAT.pack(now, kind, *padded) + text.encode()[-TEXT_BYTES:])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return False  # nobody is there; whoever waits for an answer finds the process dead
        self._words[self._ours] = now
        return True

    def get(self, timeout: float = 0.0) -> Message | None:
        """The next message, or None if none comes in time."""
        message = self.peek(timeout)
        if message is not None:
            self.drop()
        return message

    def peek(self, timeout: float = 0.0) -> Message | None:
        """The next message, which stays the next until `drop`: an interrupt loses nothing."""
        if timeout > 0:
            wait_for([self.fd], timeout)
        last_put = self._words[self._theirs]
        try:
            data = self._socket.recv(_FORMAT.size + TEXT_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, ConnectionResetError):
            data = b""
        if not data:
            self._taken = max(self._taken, last_put)
            return None
        self._peeked, kind, *numbers = _FORMAT.unpack_from(data)
        return Message(kind, tuple(numbers), data[_FORMAT.size :].decode(errors="replace"))

    def drop(self) -> None:
        """Take the message that was peeked at out of the line."""
        self._socket.recv(1)  # the rest of it goes too
        self.leave()

    def leave(self) -> None:
        """Leave the message that was peeked at in the line, but count it as mail no more."""
        self._taken = self._peeked

    def turn_around(self) -> None:
        """Be the worker's end; in one process, once."""
        if self._turned_in == os.getpid():
            return
        self._turned_in = os.getpid()
        self._peeked = self._taken = 0
        self._socket.detach()
        self._near, self._far = self._far, self._near
        self._ours, self._theirs = self._theirs, self._ours
        self._open()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.detach()  # the descriptor is closed by its SharedFd

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_socket"], state["_words"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
