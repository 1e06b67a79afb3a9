"""A read-only view of shared memory that belongs to somebody else.

Its pages are mapped once more, and that mapping is protected: who writes to it ends with SIGSEGV,
and nobody else sees what was written. The owner's own mapping stays as it is.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import numpy as np

_MREMAP_MAYMOVE = 1
_FAILED = ctypes.c_void_p(-1).value


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The same bytes, in pages that cannot be written; None if this system has no way to do that.

    array: in one piece, in memory that was mapped shared. It is kept as long as what is returned.
    """
    libc = _libc()
    if libc is None or not array.nbytes:
        return None
    start = array.ctypes.data
    first = start - start % mmap.PAGESIZE
    nbytes = -(-(start + array.nbytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE
    mapped = libc.mremap(first, 0, nbytes, _MREMAP_MAYMOVE)  # 0: the old mapping stays too
    if mapped == _FAILED:
        return None
    region = (ctypes.c_char * array.nbytes).from_address(mapped + start - first)
    weakref.finalize(region, _unmap, libc, mapped, nbytes, array).atexit = False
    if libc.mprotect(mapped, nbytes, mmap.PROT_READ) != 0:
        return None
    return np.frombuffer(memoryview(region), np.uint8)


def _unmap(libc: ctypes.CDLL, mapped: int, nbytes: int, array: Any) -> None:
    libc.munmap(mapped, nbytes)  # before the owner of `array` may use its memory for another


def _libc() -> ctypes.CDLL | None:
    """The C library, if it can map pages twice."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mremap"):
        return None
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
