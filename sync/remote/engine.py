"""Engines run functions in processes on other machines: the interface of gloo, RPC and Ray.

The remote schemes and collectors are written once, on this interface.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class PeerDied(ConnectionError):
    """The process that was called is gone or out of reach; the text says how that is known."""


class PackedBlock(NamedTuple):
    """A block as its engine sends it.

    content: what `Engine.post` takes.
    mechanism: how it travels, for statistics.
    """

    content: Any
    mechanism: str


class Engine(ABC):
    """The trainer's side of the connections to its peers, which are numbered from 0.

    Functions are found by name in the peer's process (module-level ones). Each call runs in a
    thread of its own, so that a peer serves several at a time.

    mechanism: how a block travels, for statistics.
    hint: what may be wrong if a peer does not answer, as the end of an error message.
    """

    num_peers: int
    mechanism: ClassVar[str] = "unnamed"
    hint: ClassVar[str] = ""

    @abstractmethod
    def call(self, peer: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `function(*args)` in the peer's process; returns at once.

        The future ends in the function's result, in its exception (with the peer's traceback as a
        note), or in `PeerDied` as soon as the engine notices.
        """

    def pack_block(self, block: Tensor) -> PackedBlock:
        """The block as `post` takes it; made once for all peers that get the block."""
        return PackedBlock(block, self.mechanism)

    @abstractmethod
    def post(
        self, peer: int, function: Callable[..., Future[Any]], packed: PackedBlock, *args: Any
    ) -> Future[Any]:
        """Run `function(block, *args)` in the peer's process; returns at once.

        The function is quick and returns a future; the future here ends as that one does. It may
        keep the block. The arguments and the result are such that plain pickle can handle them. The
        block may be written again only when the futures of all its posts are done, and never if one
        of them ended in `PeerDied`: the engine may still be reading it.
        """

    @abstractmethod
    def gone(self, peer: int) -> str | None:
        """Why the peer cannot be called any more; None while it can. Cheap."""

    def release(self, peer: int) -> None:
        """The peer's process has ended, perhaps while it joined: let others join."""

    @abstractmethod
    def describe(self, peer: int) -> str:
        """What error messages call the peer: its number, and its name or address."""

    @abstractmethod
    def close(self) -> None:
        """End what the engine itself started, within a bounded time; may be called twice."""


# -- memory that blocks are received into, used again once a worker has answered

# New memory costs a page fault for every 4 KiB, which takes longer than receiving into it.
_MOST_FREE = 4  # kept in a process, for all its workers
_memory_lock = threading.Lock()  # guards both
_free: list[Tensor] = []
_lent: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by id


def lend_block(nbytes: int) -> Tensor:
    """Memory of this size; what is in it is not defined."""
    with _memory_lock:
        fitting = [place for place, block in enumerate(_free) if block.numel() == nbytes]
        block = _free.pop(fitting[0]) if fitting else torch.empty(nbytes, dtype=torch.uint8)
        _lent[id(block)] = block
    return block


def give_back(block: Tensor) -> None:
    """Nobody reads this memory any more. Memory that was not lent here is left alone."""
    with _memory_lock:
        if _lent.pop(id(block), None) is block:
            _free.append(block)
            del _free[:-_MOST_FREE]
