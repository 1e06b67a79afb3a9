"""Where the model of a worker lives: a block that the sender may write while the worker rests.

    sender                                  worker
    ------                                  ------
    write a slot, announce it               take the turn; is something newer announced? apply it
    is the turn free? take it               use the model, whose memory is the block
        copy the slot into the block        give the turn back
    give it back                            rest

So a version is in use without anybody being woken for it. A worker that does not rest takes it from
the slot, as always; so does one that finds its block half written, because the sender died or was
stopped there.

The turn is a lock on one byte of shared memory. The kernel takes it back from a process that ends,
however it ends. Where there are no such locks, nothing lives in a block, and everybody is woken.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable

from sync.memory import SharedFd
from sync.snapshot import NEVER, Snapshot

# Copying this much takes a sender about as long as waking a worker.
HOME_BYTES = 1 << 17
_PATIENCE_S = 0.1  # a sender that keeps a turn for longer was stopped
_SET = getattr(fcntl, "F_OFD_SETLK", None)
_LOCK = struct.Struct("@hhqqi4x")


class Turns:
    """Which of two processes may touch a worker's block; one byte of the memory stands for each.

    Opened anew by every process and by every user in it, since users of one do not shut each other
    out.
    """

    def __init__(self, memory: SharedFd):
        if _SET is None:
            raise OSError("this system has no locks that belong to an open file")
        self._file = SharedFd(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR | os.O_CLOEXEC))
        self._requests: dict[int, tuple[bytes, bytes]] = {}

    def _request(self, byte: int) -> tuple[bytes, bytes]:
        take, give = (_LOCK.pack(kind, 0, byte, 1, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK))
        return self._requests.setdefault(byte, (take, give))

    def take(self, byte: int) -> bool:
        """Take a turn if it is free."""
        assert _SET is not None
        request = self._requests.get(byte) or self._request(byte)
        try:
            fcntl.fcntl(self._file.fd, _SET, request[0])
        except BlockingIOError:
            return False
        return True

    def give(self, byte: int) -> None:
        assert _SET is not None
        fcntl.fcntl(self._file.fd, _SET, self._requests[byte][1])

    def close(self) -> None:
        self._file.close()


AWAY, IN_USE, RESTING = range(3)


class Home:
    """The worker's side: its block, and whether the sender may write it.

    tell: says AWAY, IN_USE or RESTING where the sender sees it, who then need not try in vain.
    rests: whether the turn is given back while nobody is between `enter` and `leave`.

    An interrupt at any point may leave the turn taken for nobody, and never the opposite.
    """

    def __init__(self, block: Snapshot, turns: Turns, byte: int, tell: Callable[[int], None]):
        self.block = block
        self.rests = False
        self._turns = turns
        self._byte = byte
        self._tell = tell
        self._users = 0
        self._taken = False

    @property
    def torn(self) -> bool:
        """Whether the sender began to write and did not finish."""
        return self.block.version == NEVER

    def enter(self) -> bool:
        """Keep the sender off the block until `leave`; False if it does not let go of it."""
        if not self._take():
            return False
        self._users += 1
        return True

    def leave(self) -> None:
        self._users = max(0, self._users - 1)
        if self.rests and self._users == 0:
            self._give()

    def rest(self) -> None:
        """Let the sender in, whenever nobody has entered."""
        self.rests = True
        if self._users == 0:
            self._give()

    def work(self) -> bool:
        """Keep the sender off from now on; False if the sender does not let go of the block."""
        taken = self._take()
        self.rests = False
        return taken

    def _take(self) -> bool:
        if not self._taken:
            deadline = time.monotonic() + _PATIENCE_S
            while not self._turns.take(self._byte):
                if time.monotonic() > deadline:
                    return False
                time.sleep(20e-6)
            self._taken = True
            self._tell(IN_USE)
        return True

    def _give(self) -> None:
        self._taken = False
        self._tell(RESTING)
        self._turns.give(self._byte)

    def go_away(self) -> None:
        """Have the sender write here no more."""
        self._tell(AWAY)

    def close(self) -> None:
        self._turns.close()
