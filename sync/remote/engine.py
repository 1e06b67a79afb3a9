"""Engines run functions in processes on other machines: the interface of gloo, RPC and Ray.

The remote schemes and collectors are written once, on this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

from torch import Tensor


class PeerDied(ConnectionError):
    """The process that was called is gone or out of reach; the text says how that is known."""


class Engine(ABC):
    """The trainer's side of the connections to its peers, which are numbered from 0.

    Functions are found by name in the peer's process (module-level ones). Arguments and results are
    such that plain pickle can handle them; whoever sends others sends them as bytes. Each call runs
    in a thread of its own, so that a peer serves several at a time.

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
        note), or in `PeerDied` as soon as the engine notices. If the function returns a future, its
        result is awaited, and occupies no thread meanwhile. Memory of the arguments may be written
        again when the call has ended, but never if it ended in `PeerDied`.
        """

    def share(self, block: Tensor) -> Any:
        """The block as an argument of `call`; made once for all peers that get it."""
        return block.numpy()

    @abstractmethod
    def gone(self, peer: int) -> str | None:
        """Why the peer cannot be called any more; None while it can. Cheap."""

    @abstractmethod
    def describe(self, peer: int) -> str:
        """What error messages call the peer: its number, and its name or address."""

    @abstractmethod
    def close(self) -> None:
        """End what the engine itself started, within a bounded time; may be called twice."""
