"""A descriptor that one process makes readable to wake another, and a memory fence."""

from __future__ import annotations

import os

from sync.local.memory import SharedFd


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


class Fence(SharedFd):
    """A store-load barrier between processes.

    `fence()` orders memory accesses on every kind of processor: all earlier writes of this process
    to shared memory are visible to other processes before its later reads. Python has no such
    instruction. Writing to an eventfd that all processes share takes the kernel's lock of that
    object, and a process that takes the lock sees what earlier holders wrote. A process that is
    stopped or killed cannot keep that lock.

    fd: the descriptor of another process's fence.
    """

    def __init__(self, fd: int | None = None):
        super().__init__(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd)

    def __call__(self) -> None:
        os.eventfd_write(self.fd, 1)  # its 64-bit counter does not fill up
