"""What a run changes of its process. The next run here must not see it: it is put back."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from collectors.rollout.seeds import Streams

KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Keep so much of what is freed for the next allocation; no matter for a next run.

    An update frees and asks for the same few megabytes again. By its own rules glibc gives them
    back to the kernel in between, which then clears every page anew.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


@contextmanager
def own_state(*, seed: int, num_threads: int) -> Iterator[None]:
    """Global random streams from `seed` and so many torch threads; what was before, afterwards."""
    streams, threads = Streams(), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        streams.resume()
