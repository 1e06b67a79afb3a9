"""Torn weights on purpose: a share of each version is older than the rest.

    span 1, share 0.5      send(): version 5                     worker
    -----------------      -----------------                     ------
    the pipeline             5: w5 b5 v5 s5
                             4: w4 b4 v4 s4
                             composes w5 b4 v4 s5   --->         take(): stamped 5

A worker that reads while a trainer writes without synchronisation (`schemes/hogwild.py`) gets such
weights. Here the amount is chosen, and two runs with the same seed are torn in the same way. A
worker's first version is not torn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lockstep_check.ages import of_age
from sync.model.block import Snapshot

_PURPOSE = 1_000_003  # of the random stream: no other effect draws from [seed, this, version]


@dataclass(frozen=True)
class Tear:
    """How much of each version is older than the rest.

    share: the share of tensors or elements that are older; a draw rounds it to a whole number.
    span: how many versions older they are.
    unit: "tensor" (parameters and buffers, each whole) or "element" (single numbers of them).
    seed: of the choice. It depends on it and on the version, and on nothing else.
    """

    share: float = 0.0
    span: int = 1
    unit: Literal["tensor", "element"] = "tensor"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share}: expected a share, 0 to 1")
        if type(self.span) is not int or self.span < 1:
            raise ValueError(f"span={self.span!r}: expected a number of versions, 1 or more")
        if self.unit not in ("tensor", "element"):
            raise ValueError(f"unit={self.unit!r}: expected tensor or element")

    @classmethod
    def of(cls, given: Tear | None) -> Tear | None:
        """The same `Tear`; None if nothing would be torn."""
        if not isinstance(given, Tear | None):
            raise ValueError(f"tear={given!r}: expected a Tear")
        return None if given is None or given.share == 0 else given

    def choose(self, version: int, count: int) -> Tensor:
        """Which of `count` tensors or elements are older in `version`, counted over the run."""
        random = np.random.default_rng([self.seed, _PURPOSE, version])
        number = int(self.share * count + random.random())
        return torch.from_numpy(np.sort(random.permutation(count)[:number]))


def older_part(past: Sequence[Snapshot], block: Snapshot, span: int) -> Snapshot:
    """What a version is torn with: the newest that the worker was sent `span` versions before it,
    or the first one.
    """
    old = [one for one in past if one.version <= of_age(span, block.version)]
    return old[-1] if old else past[0]


def compose(tear: Tear, number: int, newest: Snapshot, older: Snapshot, into: Snapshot) -> None:
    """Write the newest version into a block, with the chosen values replaced by older ones.

    number: of the version, counted over the run.
    """
    into.become(newest)
    pairs = list(zip(into.views, older.views, strict=True))
    if tear.unit == "tensor":
        for i in tear.choose(number, len(pairs)).tolist():
            pairs[i][0].copy_(pairs[i][1])
    else:
        chosen = tear.choose(number, sum(view.numel() for view in into.views))
        start = 0
        for view, old in pairs:
            stop = start + view.numel()
            first, last = torch.searchsorted(chosen, torch.tensor([start, stop])).tolist()
            where = chosen[first:last] - start
            view.view(-1)[where] = old.view(-1)[where]
            start = stop
    if into.checksums:
        into.seal()
