"""The trainer's connection to one worker: a process on this machine, or a node on another one.

    pool                                channel                          worker
    ----                                -------                          ------
    start(spec)                    ->   start it                    ->   make policy, environments
                                   <-   Hello                       <-
    meet()                         ->   have it take version 0
                                   <-   Met                         <-
    order(serial, versions)        ->   one batch, please           ->   collect
                                   <-   Filled                      <-
    ask(number, method, args)      ->   between two steps: do this  ->   do it
                                   <-   Answer                      <-
    tell_to_stop(), end(timeout)   ->   stop                        ->   leave

Messages of the worker are queued until the pool calls `receive`, which never waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from collectors.data.batch import Filled
from collectors.rollout.frame_block import FrameLayout
from sync.errors import WorkerError

# Of a worker: where its frames are, how often it was replaced, and the frames that it was told not
# to make.
FRAME_COUNTS = ("collected", "delivered", "dropped", "in_flight", "restarts", "preempted")


class CannotReplace(RuntimeError):
    """This process cannot start a replacement for a lost process."""


class Hello(NamedTuple):
    """The worker has created its policy and environments."""

    num_envs: int
    environment: str


class Met(NamedTuple):
    """The worker uses the first version of every model."""


class Blocks(NamedTuple):
    """The layout of the worker's blocks, which are shared memory now."""

    layout: FrameLayout


class Answer(NamedTuple):
    """What a control call returned, pickled; or, if it raised, the error's text."""

    number: int
    ok: bool
    value: Any


class Failed(NamedTuple):
    """The worker raised an error or, with `died`, is gone. Messages add the text to its name."""

    text: str
    died: bool = False


Event = Hello | Met | Filled | Answer | Failed


class WorkerChannel(ABC):
    """One worker's connection; `start` may be called again after `end`.

    where: the worker's place, for error messages.
    """

    where: str = ""

    @abstractmethod
    def start(self, spec: Any, generation: int) -> None:
        """Start the worker that `spec` describes; returns at once."""

    @abstractmethod
    def meet(self) -> None:
        """Have the worker connect its schemes, if it does not do so by itself."""

    @abstractmethod
    def order(self, serial: int, versions: Mapping[str, int]) -> None:
        """Request one batch, with weights no older than these versions, by model."""

    @abstractmethod
    def release(self, filled: Filled) -> None:
        """The batch is no longer needed: its memory can be overwritten."""

    def cut(self, serial: int) -> None:
        """Have the worker hand over this batch as it is."""
        raise NotImplementedError

    @abstractmethod
    def ask(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        """Call a method of the worker between two steps."""

    @abstractmethod
    def receive(self) -> list[Event]:
        """All events since the last call."""

    @abstractmethod
    def fds(self) -> list[int]:
        """Descriptors that become readable when there may be something to receive."""

    @abstractmethod
    def gone(self) -> str | None:
        """How the worker's process ended, as it follows "died" in a message; None while it runs."""

    @abstractmethod
    def must_look(self) -> bool:
        """Whether the process may be gone without any descriptor showing it."""

    @abstractmethod
    def progress(self) -> Hashable:
        """Something that changes while the worker makes progress."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether the worker is known to be busy with something other than a batch."""

    @abstractmethod
    def activity(self) -> str:
        """What the worker does, as it follows "it" in a message."""

    def patience(self, timeout: float) -> float:
        """How long the worker may go on with its current activity without progress."""
        return timeout

    @abstractmethod
    def stuck(self, timeout: float) -> str:
        """The error text for a worker without progress, as it follows its name."""

    @abstractmethod
    def frame_counts(self) -> dict[str, Any]:
        """Frames of this generation, as far as the worker has reported, and what else is known."""

    @abstractmethod
    def stamps_of_finished(self, filled: Filled) -> Tensor:
        """The versions [envs, steps] of a batch, also of steps in which environments only reset."""

    def stamps_so_far(self, serial: int) -> Tensor | None:
        """The same for the current batch, including the current step; None if not known here."""
        return None

    def refresh(self) -> None:
        """Ask for counts of this moment, unless they are at hand."""

    def is_fresh(self) -> bool:
        """Whether the counts that `refresh` asked for have come, or are not to be waited for."""
        return True

    @abstractmethod
    def tell_to_stop(self, timeout: float, close_env: bool) -> None:
        """Ask the worker to end; returns at once."""

    @abstractmethod
    def end(self, timeout: float) -> None:
        """Wait so long for the worker's end, then force it."""

    def make_way(self, failure: WorkerError | None) -> None:
        """End what is left of a worker that failed like this, so that another can be started."""
        self.end(0.0)

    def close(self) -> None:
        """Release the resources of the channel itself."""
