"""What a library's adapter implements, and what the checks are written against.

An adapter is a module with two names:

    LIBRARY = "mylibrary 1.2"
    SCHEMES = {"shared": opener, ...}    # opener(num_workers, width) -> System

and, for schemes with which it can hold an asynchronous trainer at staleness zero:

    TRAINERS = {"shared": train, ...}    # train(asynchronous=True, updates=10) -> list of numbers

For a library whose workers are processes that the user starts, `processes.py` makes the opener out
of a trainer's side and a worker's side. For a library whose collectors start the workers,
`frames.py` has a base class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .weights import NumberedModel


@dataclass
class Tally:
    """What the policy calls of one worker saw.

    stamped: calls with a stamp, which is the number of the publish whose weights were used, as the
        library says; the initial weights are number 0.
    last: the number in the last call's weights; NaN if that call was torn.
    highest: the highest number that any call saw.
    """

    calls: int = 0
    torn: int = 0
    stamped: int = 0
    wrong_stamps: int = 0
    last: float = math.nan
    highest: float = -math.inf

    def add(self, stamp: int | None, low: float, high: float) -> None:
        """One call: its stamp, if it has one, and the lowest and highest number in its weights."""
        is_whole = low == high
        self.calls += 1
        self.torn += not is_whole
        if stamp is not None and is_whole:
            self.stamped += 1
            self.wrong_stamps += stamp != low
        self.last = low if is_whole else math.nan
        self.highest = max(self.highest, high)


class System(ABC):
    """A trainer with its workers, connected and calling the policy.

    model: the trainer's own, which the checks change in place.
    pids: the workers' processes.
    """

    model: NumberedModel
    pids: list[int]

    @abstractmethod
    def publish(self, model: NumberedModel, worker_ids: list[int] | None) -> None:
        """Publish the weights of `model`: the trainer's own, or another with the same names.

        worker_ids: to these workers only; `NotImplementedError` if the library cannot.
        """

    @abstractmethod
    def observe(self) -> list[Tally]:
        """What each worker saw since this was asked last; at least one call of each."""

    def take_turn(self) -> None:
        """What a training loop does between publishes, such as taking a batch."""

    @abstractmethod
    def close(self) -> None:
        """End the workers."""


Opener = Callable[[int, int], System]


class Train(Protocol):
    """A small training, always from the same seed."""

    def __call__(self, *, asynchronous: bool, updates: int) -> list[float]:
        """A number of the weights after each update, the sum of their squares say.

        asynchronous: by the asynchronous trainer, held at staleness zero.
        """
        ...
