"""The two ends of a wire format, and what a format does to the numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sync.binding import Binding
from sync.layout import Layout
from sync.snapshot import Snapshot

if TYPE_CHECKING:
    from sync.wire.delta import Bases


class Deviation(NamedTuple):
    """How far what arrives is from what was sent: the worst number, and all of them together.

    relative_rms: the root of the summed squares of the differences, over that of the numbers.
    """

    max_abs: float
    relative_rms: float


EXACT = Deviation(0.0, 0.0)


class Encoder(ABC):
    """Packs models into blocks as they travel; belongs to the sender."""

    layout: Layout  # of the blocks that travel

    def bases_of(self, worker: int) -> Bases | None:
        """Where a worker's transport is to say what the worker holds, if that matters."""
        return None

    def split(self, workers: list[int]) -> list[list[int]]:
        """Workers who get the same weights, by who can be sent the same block."""
        return [workers]

    @abstractmethod
    def pack(
        self,
        binding: Binding,
        block: Snapshot,
        version: int,
        workers: Collection[int],
        *,
        check_finite: bool,
    ) -> Deviation:
        """Write the model into `block` as `version`, in a form that all `workers` can read.

        What cannot be written is a `ValueError`, and the workers stay on the last good version.
        """

    def offering(self, workers: Collection[int]) -> None:
        """What was packed last for these workers is about to be offered to them."""

    def pack_again(self, worker: int, block: Snapshot) -> bool:
        """Write what this worker was offered last so that its successor can read it.

        False where every block can be read by anybody, and offered again as it is.
        """
        return False


class Decoder(ABC):
    """Unpacks blocks that came into blocks as models are laid out; belongs to a receiver."""

    def can_read(self, block: Snapshot) -> bool:
        """Whether all that the block builds on is here."""
        return True

    @abstractmethod
    def unpack(self, block: Snapshot) -> Snapshot:
        """The whole model; valid until the next call."""


def private_snapshot(layout: Layout) -> Snapshot:
    """A block that only this process sees."""
    return Snapshot(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))


def deviation(sent: list[Tensor], arrives: list[Tensor]) -> Deviation:
    """Of numbers, given in stretches; NaN and infinite ones are left out.

    A finite number that arrives as an infinite one makes the worst difference infinite.
    """
    worst = squares = size = 0.0
    for ours, theirs in zip(sent, arrives, strict=True):
        if ours.is_complex():
            continue
        here, there = _wide(ours), _wide(theirs)
        difference = there - here
        largest = _largest(difference)
        if not math.isfinite(largest):
            finite = torch.isfinite(here)
            here = torch.where(finite, here, 0)
            difference = torch.where(finite, difference, 0)
            largest = _largest(difference)
        worst = max(worst, largest)
        squares += _sum_of_squares(difference)
        size += _sum_of_squares(here)
    return Deviation(worst, math.sqrt(squares / size) if 0.0 < size < math.inf else 0.0)


def _largest(difference: Tensor) -> float:
    return float(difference.abs().amax()) if difference.numel() else 0.0


def _sum_of_squares(numbers: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(numbers))
    if not math.isfinite(norm):  # the squares of large numbers
        norm = float(torch.linalg.vector_norm(numbers, dtype=torch.float64))
    return norm**2 if norm < 1e150 else math.inf


def _wide(stretch: Tensor) -> Tensor:
    return stretch.float() if stretch.element_size() < 4 else stretch
