"""A descriptor that one process makes readable to wake another, and a memory fence."""

from __future__ import annotations

import os
from typing import Any

from sync.local.memory import SharedFd


class Doorbell(SharedFd):
    """Wakes every process that polls it. Ringing never blocks, also if another process died."""

    def __init__(self, fd: int | None = None):
        self._ring_fd: SharedFd | None = None
        if fd is not None:  # received from another process
            super().__init__(fd)
        elif hasattr(os, "eventfd"):
            super().__init__(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        else:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            os.set_blocking(writer, False)
            super().__init__(reader)
            self._ring_fd = SharedFd(writer)

    def ring(self) -> None:
        """Make the descriptor readable until it is silenced."""
        try:
            if self._ring_fd is None:
                os.eventfd_write(self.fd, 1)
            else:
                os.write(self._ring_fd.fd, b"\0")
        except BlockingIOError:
            return  # it is readable already
        except (OSError, ValueError):
            if self.fd >= 0:
                raise
            return  # it is closed: no process waits for it

    def silence(self) -> None:
        """Make the descriptor unreadable until the next ring."""
        try:
            if self._ring_fd is None:
                os.read(self.fd, 8)
            else:
                while os.read(self.fd, 4096):
                    continue
        except BlockingIOError:
            return

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ring_fd": self._ring_fd}

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFd:
        twin = super().__deepcopy__(memo)
        if self._ring_fd is not None:
            twin.__dict__["_ring_fd"] = self._ring_fd.__deepcopy__(memo)
        return twin


class Fence:
    """A store-load barrier between processes.

    `fence()` orders memory accesses on every kind of processor: all earlier writes of this process
    to shared memory are visible to other processes before its later reads. Python has no such
    instruction. Writing to an eventfd (or pipe) that all processes share takes the kernel's lock of
    that object, and a process that takes the lock sees what earlier holders wrote. A process that
    is stopped or killed cannot keep that lock.
    """

    def __init__(self, fds: list[int] | None = None):
        if fds is None and not hasattr(os, "eventfd"):
            fds = list(os.pipe())
            os.set_blocking(fds[0], False)
            os.set_blocking(fds[1], False)
        elif fds is None:
            fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)]
        self._files = [SharedFd(fd) for fd in fds]
        self._eventfd = fds[0] if len(fds) == 1 else -1

    @property
    def fds(self) -> list[int]:
        """What another process needs to share this fence."""
        return [file.fd for file in self._files]

    def __call__(self) -> None:
        if self._eventfd >= 0:
            os.eventfd_write(self._eventfd, 1)  # its 64-bit counter does not fill up
            return
        reader, writer = self.fds
        try:
            os.write(writer, b"\0")
            os.read(reader, 1)
        except BlockingIOError:
            return  # another process read the byte, but the pipe's lock was taken
