"""Tells whether another process on this machine still runs, and how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import weakref
from collections.abc import Collection

from sync.local.memory import SharedFd

PIDFDS = hasattr(os, "pidfd_open")
_LOOK_S = 0.05


class Watch:
    """Tells whether a process is gone; pollable if the kernel supports it (pidfd).

    Otherwise, or if no descriptor is available, the process is looked up by its number.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self.ending = ""  # "exit code 1" or "killed by SIGKILL", where that can be known
        self.gone = False
        self._fd: SharedFd | None = None
        try:
            if PIDFDS:
                self._fd = SharedFd(os.pidfd_open(pid))
        except ProcessLookupError:
            self._note_end()
        except OSError:
            pass  # no descriptors are left, or a sandbox forbids it: look it up instead
        if self._fd is None and not self.gone:
            _LOOKED_UP.add(self)

    def notice(self, ready: Collection[int]) -> None:
        """Use the result of a poll: the descriptors that were readable."""
        if not self.gone and (self._fd.fd in ready if self._fd else not _exists(self.pid)):
            self._note_end()

    def _note_end(self) -> None:
        self.ending = _ending(self.pid)
        self.gone = True
        _LOOKED_UP.discard(self)

    def look(self) -> bool:
        """Whether the process is gone now."""
        if not self.gone:
            self.notice(_readable(self._fd.fd) if self._fd is not None else ())
        return self.gone

    def fds(self) -> list[int]:
        """What becomes readable when the process ends."""
        return [self._fd.fd] if self._fd is not None and not self.gone else []

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ends within so many seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.look() and (left_s := deadline - time.monotonic()) > 0:
            if self._fd is not None:
                _readable(self._fd.fd, left_s)
            else:
                time.sleep(min(left_s, _LOOK_S))
        return self.gone

    def kill(self) -> None:
        """Kill the process, but not another one that has its number by now."""
        with contextlib.suppress(ProcessLookupError):
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd.fd, signal.SIGKILL)
            elif not self.look():
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Release the descriptor. Another thread may still look; it is told nothing new."""
        if self._fd is not None:
            self._fd.close()
        _LOOKED_UP.discard(self)


_LOOKED_UP: weakref.WeakSet[Watch] = weakref.WeakSet()


def must_look() -> bool:
    """Whether there are processes whose end cannot be polled."""
    return bool(_LOOKED_UP)


def _readable(fd: int, timeout_s: float = 0.0) -> list[int]:
    poll = select.poll()
    if fd >= 0:
        poll.register(fd, select.POLLIN)
    return [ready for ready, _ in poll.poll(timeout_s * 1000)]


def _exists(pid: int) -> bool:
    if _ended_child(pid) is not None:  # not yet waited for: it exists, but has ended
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True


def _ending(pid: int) -> str:
    """How a child ended that was not waited for yet; empty for any other process."""
    ended = _ended_child(pid)
    if ended is None:
        return ""
    code, status = ended
    if code == os.CLD_EXITED:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(status).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {status}"


def _ended_child(pid: int) -> tuple[int, int] | None:
    if not hasattr(os, "waitid"):
        return None
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None  # not a child of this process, or waited for already
    return None if ended is None else (ended.si_code, ended.si_status)
