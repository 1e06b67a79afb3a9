"""Engines: running functions in processes on other machines, whatever brings the call there.

Schemes and collectors for several machines are written once, on this; Ray, torch.distributed.rpc
and torch.distributed differ in their engines alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor


class PeerDied(ConnectionError):
    """The process that was called is gone, or cannot be reached any more; the text says why."""


class Route(Protocol):
    """A peer's way to another peer; it travels to the one that calls."""

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have `function(*args)` run there, as `Engine.call` does."""


class Engine(ABC):
    """The trainer's side of a line to each of its peers, which are numbered from 0.

    Functions are found by name in the peer's process (module-level ones), and run there in a thread
    of their own, so that a call can be served while another one takes its time.
    """

    num_peers: int
    hands_on = False  # whether peers can call each other: see `route`

    @abstractmethod
    def call(self, peer: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have `function(*args)` run in the peer's process; returns at once.

        The future ends in what it returned, in what it raised (the peer's traceback in a note), or
        in `PeerDied`, which comes as soon as the engine notices.
        """

    def parcel(self, block: Tensor) -> Any:
        """The block in the form in which `post` takes it, made once for all that are sent it."""
        return block

    def post(self, peer: int, function: Callable[..., Any], parcel: Any, *args: Any) -> Future[Any]:
        """`function(block, *args)` in the peer's process, which may keep the block.

        The block may be written again only when the futures of all posts of it are done. What is
        posted, and its answer, are as `wire.Post` says.
        """
        return self.call(peer, function, parcel, *args)

    def route(self, taker: int, giver: int) -> Route | None:
        """How peer `taker` calls peer `giver`; None: not, or not yet. Returns at once.

        Engines that bring a parcel to each node by themselves need none.
        """
        return None

    @abstractmethod
    def gone(self, peer: int) -> str | None:
        """Why the peer can be called no more; None while it can. Costs next to nothing."""

    def release(self, peer: int) -> None:
        """The peer's process has ended, be it while it joined: have nobody wait for it any more."""

    @abstractmethod
    def describe(self, peer: int) -> str:
        """What error messages call the peer: its name and address."""

    @abstractmethod
    def close(self) -> None:
        """End what the engine itself began, within a bounded time; harmless when done twice."""
