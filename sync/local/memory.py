"""Anonymous shared memory, passed from process to process by file descriptor, and blocks in it.

It has no name in the file system, so nothing can be left behind: the kernel frees it when the last
process that has it ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from sync.model.block import Layout, Snapshot, aligned


class SharedFd:
    """A file descriptor that can be pickled for a process that is being started.

    It is closed with the object, if not before. But a Ctrl-C during that would be lost, so what
    goes while a program runs is closed first. In a reference cycle it may be closed before other
    objects of the cycle use it for the last time. `fd` is -1 then, because the system gives the
    number to the next file that is opened.
    """

    def __init__(self, fd: int):
        self._numbers = [fd]
        self._close = finalize(self, _close, self._numbers, self._open(fd))
        self._close.atexit = False

    @property
    def fd(self) -> int:
        """The number of the descriptor; -1 once it is closed."""
        return next(iter(self._numbers), -1)

    def _open(self, fd: int) -> Callable[[], object]:
        """What closes it."""
        return partial(os.close, fd)

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        """Close it; a second call does nothing."""
        self._close()

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": DupFd(self.fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd = state.pop("fd").detach()
        self.__dict__.update(state)
        SharedFd.__init__(self, fd)


def _close(numbers: list[int], close: Callable[[], object]) -> None:
    numbers.clear()
    close()


class AnonymousMemory(SharedFd):
    """`nbytes` of zeroed shared memory. Pages use memory only after they are first written.

    fd: the descriptor of memory that another process created.
    """

    def __init__(self, nbytes: int, fd: int | None = None):
        self.nbytes = aligned(max(nbytes, 1), mmap.PAGESIZE)
        if fd is not None:
            super().__init__(fd)
            return
        super().__init__(anonymous_file())
        with _naming_the_size(self.nbytes):
            os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def map(self, offset: int, nbytes: int, *, writable: bool) -> Tensor:
        """A uint8 tensor over part of the memory; it keeps the mapping alive on its own.

        Writing to a read-only mapping ends the process with SIGSEGV.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with _naming_the_size(nbytes):
            region = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED, protection, offset=offset)
        with torch.inference_mode(False):  # an inference tensor could not be written elsewhere
            return tensor_over(np.frombuffer(region, dtype=np.uint8))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "nbytes": self.nbytes}


def anonymous_file() -> int:
    """The descriptor of a new file without a name and, so far, of 0 bytes."""
    return os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


@contextlib.contextmanager
def _naming_the_size(nbytes: int) -> Iterator[None]:
    """Add the requested size to an error, since there is no file name to show."""
    try:
        yield
    except OSError as error:
        error.filename = f"{nbytes} bytes of shared memory"
        raise


def as_bytes(buffer: Tensor) -> memoryview:
    """The memory of a uint8 CPU tensor."""
    view: memoryview = memoryview(buffer.numpy()).cast("B")  # type: ignore[arg-type]
    return view


def tensor_over(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over the memory of an array, which is only to be read if the array is read-only."""
    interface = array.__array_interface__
    # Torch has no read-only tensors, and would warn about a read-only array.
    interface = {**interface, "data": (interface["data"][0], False)}
    claimed = SimpleNamespace(__array_interface__=interface, keep=array)
    return torch.from_numpy(np.asarray(claimed))


class BlockPool:
    """`capacity` blocks of one layout in shared memory, written by the sender and read by workers.

    There are more blocks than can ever be in use at once, so that a sender never waits for a
    reader. Only blocks that were written take memory, and the sender always writes the lowest free
    one. If workers keep up, only two or three blocks take memory.

    fd: the memory of another process's pool; its blocks are read-only here.
    """

    def __init__(self, layout: Layout, capacity: int, fd: int | None = None):
        self.layout = layout
        self.capacity = capacity
        self._stride = aligned(layout.nbytes, mmap.PAGESIZE)
        self._memory = AnonymousMemory(self._stride * capacity, fd)
        self._writable = fd is None
        self._mapped: dict[int, Snapshot] = {}

    @property
    def fd(self) -> int:
        return self._memory.fd

    def __getitem__(self, number: int) -> Snapshot:
        if number not in self._mapped:
            start = number * self._stride
            buffer = self._memory.map(start, self._stride, writable=self._writable)
            self._mapped[number] = Snapshot(self.layout, buffer)
            self._mapped[number].number = number
        return self._mapped[number]

    def free(self, held: Collection[int]) -> Snapshot:
        """The lowest block whose number is not `held`."""
        for number in range(self.capacity):
            if number not in held:
                return self[number]
        raise AssertionError(f"all {self.capacity} blocks are in use: one is not released")

    @property
    def memory_bytes(self) -> int:
        """How much memory the pool has taken so far."""
        return len(self._mapped) * self._stride

    def close(self) -> None:
        """Release the memory in this process. Existing views of a block keep its memory."""
        self._mapped.clear()
        self._memory.close()
