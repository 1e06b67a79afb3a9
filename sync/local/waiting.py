"""What a process of this machine waits for: doorbells, the end of other processes, and time.

Every wait is bounded. `awake_s` is a clock that does not run while this process is suspended.
Ctrl-Z, a batch scheduler or a paused container stops all processes of a run together, and the pause
must not count as silence of a worker. Code that waits for others therefore waits in slices of one
second and reads `awake_s` after each. A step of more than two seconds between two reads is a pause,
and counts as one slice.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Collection, Iterable

from sync.local.memory import SharedFd

LONGEST_S = 1e9  # every wait is bounded, and clocks overflow not far beyond this
SLICE_S = 1.0  # code that measures how long others are silent waits in slices of this length


_clock_lock = threading.RLock()  # several threads read the clock
_awake_s, _read_at = 0.0, time.monotonic()


def awake_s() -> float:
    """Seconds like `time.monotonic`, of which at most `SLICE_S` count for a pause."""
    global _awake_s, _read_at
    with _clock_lock:
        now = time.monotonic()
        step, _read_at = now - _read_at, now
        _awake_s += step if step <= 2 * SLICE_S else SLICE_S
        return _awake_s


def _after_fork() -> None:
    global _clock_lock
    _clock_lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def wait_for(fds: Iterable[int], timeout_s: float) -> list[int]:
    """The descriptors that are or become readable within `timeout_s`; a closed one, -1, never is.

    It waits for an hour at most: call it again to wait longer.
    """
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(min(max(0.0, timeout_s), 3600.0) * 1000)]


class Doorbell(SharedFd):
    """Wakes every process that polls it. Ringing never blocks, also if another process died."""

    def __init__(self) -> None:
        super().__init__(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        """Make the descriptor readable until it is silenced."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            return  # it is readable already
        except (OSError, ValueError):
            if self.fd >= 0:
                raise
            return  # it is closed: no process waits for it

    def silence(self) -> None:
        """Make the descriptor unreadable until the next ring."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return  # it is silent already
        except OSError:
            if self.fd >= 0:
                raise


class Watch:
    """Tells whether a process is gone, by a descriptor that can be polled (pidfd).

    pid: its number; 0 for a process that has no number here, because it lives in another PID
        namespace. Such a process never counts as gone.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self.ending = ""  # "exit code 1" or "killed by SIGKILL", where that can be known
        self.gone = False
        self._fd: SharedFd | None = None
        if not pid:
            return
        try:
            self._fd = SharedFd(os.pidfd_open(pid))
        except ProcessLookupError:
            self._note_end()

    def notice(self, ready: Collection[int]) -> None:
        """Use the result of a poll: the descriptors that were readable."""
        if not self.gone and self.fd in ready:
            self._note_end()

    def _note_end(self) -> None:
        self.ending = _ending(self.pid)
        self.gone = True

    def look(self) -> bool:
        """Whether the process is gone now."""
        self.notice(wait_for(self.fds(), 0))
        return self.gone

    @property
    def fd(self) -> int:
        """What becomes readable when the process ends; -1 if that cannot be polled."""
        return -1 if self._fd is None else self._fd.fd

    def fds(self) -> list[int]:
        """The same, as long as it has not ended."""
        return [self.fd] if self.fd >= 0 and not self.gone else []

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ends within so many seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.look() and (left_s := deadline - time.monotonic()) > 0:
            wait_for(self.fds(), left_s)
        return self.gone

    def kill(self) -> None:
        """Kill the process, but not another one that has its number by now."""
        if self._fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd.fd, signal.SIGKILL)

    def close(self) -> None:
        """Release the descriptor. Another thread may still look; it is told nothing new."""
        if self._fd is not None:
            self._fd.close()


def _ending(pid: int) -> str:
    """How a child ended that was not waited for yet; empty for any other process."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""  # not a child of this process, or waited for already
    if ended is None:
        return ""
    status = ended.si_status
    if ended.si_code == os.CLD_EXITED:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(status).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {status}"
