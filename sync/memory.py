"""Anonymous shared memory and doorbells, passed from process to process by file descriptor.

Nothing here has a name in the file system, so nothing can be left behind: the kernel frees it with
the last process that holds it, however that process ended.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import mmap
import os
import platform
import select
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from sync.passing import travelling

PIDFDS = hasattr(os, "pidfd_open")
X86 = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


class SharedFd:
    """A file descriptor that survives pickling to another process (spawn, a queue, `passing.send`).

    A deep copy has a duplicate of it, for another user in the same process.
    """

    fd = -1  # until there is one: half an object, from an interrupt, has nothing to close

    def __init__(self, fd: int):
        self.fd = fd

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        state = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        twin.__dict__.update(state, fd=os.dup(self.fd))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": travelling(self.fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fd = state["fd"].detach()


class AnonymousMemory(SharedFd):
    """`nbytes` of zeroed shared memory. Pages are taken from the machine when first written."""

    def __init__(self, nbytes: int):
        self.nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(os, "memfd_create"):
            super().__init__(os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        else:  # a file without a name does the same, through the page cache
            with tempfile.TemporaryFile() as file:
                super().__init__(os.dup(file.fileno()))
        with _naming(self.nbytes):
            os.ftruncate(self.fd, self.nbytes)
        if hasattr(os, "memfd_create"):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def map(self, offset: int, nbytes: int, *, writable: bool) -> Tensor:
        """A uint8 tensor over part of the memory; it keeps the mapping alive on its own.

        Writing to a read-only mapping ends the process with SIGSEGV.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with _naming(nbytes):
            region = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED, protection, offset=offset)
        array = np.asarray(_Unguarded(np.frombuffer(region, dtype=np.uint8)))
        with torch.inference_mode(False):  # or it could not be written outside of it
            return torch.from_numpy(array)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "nbytes": self.nbytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.nbytes = state["nbytes"]


@contextlib.contextmanager
def _naming(nbytes: int) -> Iterator[None]:
    """Have an error say what could not be had: it has no file to name."""
    try:
        yield
    except OSError as error:
        error.filename = f"{nbytes} bytes of shared memory"
        raise


def as_bytes(buffer: Tensor) -> memoryview:
    """The memory of a uint8 tensor on the CPU."""
    view: memoryview = memoryview(buffer.numpy()).cast("B")  # type: ignore[arg-type]
    return view


class _Unguarded:
    """An array shown to torch as writable: it knows no read-only tensors, and warns of them."""

    def __init__(self, array: np.ndarray[Any, Any]):
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._keep = array


class Doorbell(SharedFd):
    """Wakes whoever polls it. Ringing never blocks and takes no lock that a dying process keeps."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            super().__init__(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            self._ring_fd = None
        else:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            os.set_blocking(writer, False)
            super().__init__(reader)
            self._ring_fd = SharedFd(writer)

    def ring(self) -> None:
        try:
            if self._ring_fd is None:
                os.eventfd_write(self.fd, 1)
            else:
                os.write(self._ring_fd.fd, b"\0")
        except BlockingIOError:
            return  # it is ringing already
        except (OSError, ValueError):
            if self.fd >= 0:
                raise
            return  # it is closed, as it may be in garbage already: nobody waits for it

    def silence(self) -> None:
        try:
            if self._ring_fd is None:
                os.read(self.fd, 8)
            else:
                while os.read(self.fd, 4096):
                    continue
        except BlockingIOError:
            return  # it rings no more

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "ring": self._ring_fd}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._ring_fd = state["ring"]


class Watch:
    """Tells whether a process is gone; pollable where the kernel can say so (pidfd).

    Where it cannot, or will not (no descriptors left, a sandbox), the process is looked up.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self.ending = ""  # how it ended, in words, where that can be known
        self.gone = False
        self._fd: SharedFd | None = None
        try:
            if PIDFDS:
                self._fd = SharedFd(os.pidfd_open(pid))
        except ProcessLookupError:
            self._note_end()
        except OSError:
            pass  # it will be looked up
        if self._fd is None and not self.gone:
            _LOOKED_UP.add(self)

    def notice(self, ready: Collection[int]) -> None:
        """Take in what a poll found ready, while its numbers still mean what they meant to it."""
        if not self.gone and (self._fd.fd in ready if self._fd else not _exists(self.pid)):
            self._note_end()

    def _note_end(self) -> None:
        self.ending = _ending(self.pid)
        self.gone = True
        _LOOKED_UP.discard(self)

    def look(self) -> bool:
        """Whether the process is gone now."""
        if not self.gone:
            self.notice(wait_for(self.fds(), 0) if self._fd is not None else ())
        return self.gone

    def fds(self) -> list[int]:
        return [self._fd.fd] if self._fd is not None and not self.gone else []

    def wait(self, timeout_s: float) -> bool:
        """Whether the process is gone within so long."""
        deadline = time.monotonic() + timeout_s
        while not self.look() and (left_s := deadline - time.monotonic()) > 0:
            wait_for(self.fds(), left_s)
        return self.gone

    def kill(self) -> None:
        """End the process, whatever has become of the one that started it."""
        with contextlib.suppress(ProcessLookupError):
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd.fd, signal.SIGKILL)
            elif not self.look():
                os.kill(self.pid, signal.SIGKILL)


_LOOKED_UP: weakref.WeakSet[Watch] = weakref.WeakSet()


def must_look() -> bool:
    """Whether there are processes whose end no poll shows."""
    return bool(_LOOKED_UP)


def _exists(pid: int) -> bool:
    if _ended_child(pid) is not None:  # nobody has collected it: it exists, but is gone
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True


def _ending(pid: int) -> str:
    """How a child that nobody has collected ended; of any other process that is not known."""
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
        return None  # no child of ours, or no longer
    return None if ended is None else (ended.si_code, ended.si_status)


class AwakeClock:
    """Seconds like `time.monotonic`, without those for which this process was seen to be stopped.

    Ctrl-Z, a scheduler that suspends and a container that is paused stop all processes of a run at
    a time: when they go on, none of them was silent for so long. A wait that ends long after its
    time shows it, so who measures others' silence waits for no more than `SLICE_S` at a time.
    """

    def __init__(self) -> None:
        self._stopped_s = self._seen_until = 0.0

    def __call__(self) -> float:
        return time.monotonic() - self._stopped_s

    def note(self, due: float) -> None:
        """A wait ends now that was to end at `due`, by `time.monotonic`."""
        now = time.monotonic()
        late_s = now - max(due, self._seen_until)
        if late_s > SLICE_S:
            self._stopped_s, self._seen_until = self._stopped_s + late_s, now


SLICE_S = 1.0
awake_s = AwakeClock()


def wait_for(fds: Iterable[int], timeout_s: float) -> list[int]:
    """The descriptors with news, within `timeout_s`. With processes to look up, 50 ms at most."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    timeout_s = min(timeout_s, 0.05 if must_look() else 3600.0)  # whoever needs longer calls again
    if timeout_s <= 0:
        return [fd for fd, _ in poll.poll(0)]
    due = time.monotonic() + timeout_s
    ready = [fd for fd, _ in poll.poll(timeout_s * 1000)]
    awake_s.note(due)
    return ready


class Order:
    """Makes what this process stored before visible before what it loads after, in every process.

    On x86 a locked instruction does it, and taking a lock of our own is one. Elsewhere both sides
    take and drop the same cross-process lock, which the kernel releases if its holder dies.
    """

    def __init__(self, memory: AnonymousMemory, *, locked: bool = not X86):
        self.kind = "lock" if locked else "fence"
        self._memory = memory
        self._lock = threading.Lock()
        _ORDERS.add(self)

    def __call__(self) -> None:
        with self._lock:  # in this form an interrupt cannot come between taking and dropping
            if self.kind == "lock":
                _lock_until(self._memory.fd, time.monotonic() + 10.0)
                fcntl.lockf(self._memory.fd, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, Any]:
        return {"memory": self._memory, "kind": self.kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["memory"], locked=state["kind"] == "lock")  # type: ignore[misc]


_ORDERS: weakref.WeakSet[Order] = weakref.WeakSet()


def _after_fork() -> None:
    """Leave locks behind that a thread of the parent may have held."""
    for order in list(_ORDERS):
        order._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _lock_until(fd: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("a stopped process holds the lock of the snapshots") from None
            time.sleep(20e-6)
