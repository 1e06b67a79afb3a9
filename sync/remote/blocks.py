"""Memory that blocks are received into, used again once a worker has answered.

New memory costs a page fault for every 4 KiB, which takes longer than receiving into it.
"""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_MOST = 4  # kept in a process, for all its workers
_lock = threading.Lock()  # guards both
_free: list[Tensor] = []
_lent: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by id


def lend_block(nbytes: int) -> Tensor:
    """Memory of this size; what is in it is not defined."""
    with _lock:
        fitting = [place for place, block in enumerate(_free) if block.numel() == nbytes]
        block = _free.pop(fitting[0]) if fitting else torch.empty(nbytes, dtype=torch.uint8)
        _lent[id(block)] = block
    return block


def give_back(block: Tensor) -> None:
    """Nobody reads this memory any more. Memory that was not lent here is left alone."""
    with _lock:
        if _lent.pop(id(block), None) is block:
            _free.append(block)
            del _free[:-_MOST]
