"""Memory for blocks that come again and again.

Pages that the kernel has just given out cost several times as much to write as those of a block
that came before; so what nobody looks into any more is kept for the next of its size.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

LEAST_BYTES = 1 << 18  # below, the allocator has warm memory anyway
_KEPT = 2  # blocks: while one is in use, the next can arrive


class Recycled:
    """Gives out memory of any size."""

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=_KEPT)

    def take(self, nbytes: int) -> Tensor:
        """A uint8 tensor with whatever was in it; its memory comes back when it is let go."""
        if nbytes < LEAST_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        region = self._of_size(nbytes)
        array = np.frombuffer(region, dtype=np.uint8)
        weakref.finalize(array, self._free.append, region).atexit = False
        with torch.inference_mode(False):
            return torch.from_numpy(array)

    def _of_size(self, nbytes: int) -> mmap.mmap:
        for _ in range(len(self._free)):
            try:
                region = self._free.popleft()
            except IndexError:  # another thread was sooner
                break
            if len(region) == nbytes:
                return region
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
