"""Tells whether another process on this machine still runs, and how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection

from sync.local.memory import SharedFd


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
        if not self.gone and self._fd is not None and self._fd.fd in ready:
            self._note_end()

    def _note_end(self) -> None:
        self.ending = _ending(self.pid)
        self.gone = True

    def look(self) -> bool:
        """Whether the process is gone now."""
        self.notice(_readable(self.fds()))
        return self.gone

    def fds(self) -> list[int]:
        """What becomes readable when the process ends."""
        return [self._fd.fd] if self._fd is not None and not self.gone else []

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ends within so many seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.look() and (left_s := deadline - time.monotonic()) > 0:
            _readable(self.fds(), left_s)
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


def _readable(fds: Collection[int], timeout_s: float = 0.0) -> list[int]:
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return [ready for ready, _ in poll.poll(timeout_s * 1000)]


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
