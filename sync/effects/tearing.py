"""Torn weights on purpose: a share of each version is older than the rest.

    span 1, share 0.5      send(): version 5                     worker
    -----------------      -----------------                     ------
    Tearing                  5: w5 b5 v5 s5
                             4: w4 b4 v4 s4
                             composes w5 b4 v4 s5   --->         take(): stamped 5

A worker that reads while a trainer writes without synchronisation (`schemes/hogwild.py`) gets such
weights. Here the amount is chosen, and two runs with the same seed are torn in the same way. A
worker's first version is not torn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lockstep_check.ages import of_age
from sync.effects.pipeline import Effect, Parcel, grouped
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


class Tearing(Effect):
    """Composes each version from itself and from an older one that the worker was sent.

    first_version: the number of this scheme's version 0 in the count of the whole run.
    """

    def __init__(self, tear: Tear, num_workers: int, first_version: int = 0):
        self._tear = tear
        self._first_version = first_version
        # By worker: the versions it was sent, as far back as the next versions need.
        self._sent: list[deque[Snapshot]] = [deque() for _ in range(num_workers)]

    def choose(self, parcels: Sequence[Parcel], new: Callable[[], Snapshot]) -> list[Parcel]:
        return [
            Parcel(self._compose(newest, older, new), group)
            for newest, workers in parcels
            for older, group in grouped((self._older(newest, one), one) for one in workers)
        ]

    def _older(self, newest: Snapshot, worker: int) -> Snapshot:
        """The newest version sent to the worker at least `span` versions ago, or the first one."""
        sent = self._sent[worker]
        old = [block for block in sent if block.version <= of_age(self._tear.span, newest.version)]
        return old[-1] if old else sent[0] if sent else newest

    def _compose(self, newest: Snapshot, older: Snapshot, new: Callable[[], Snapshot]) -> Snapshot:
        """The newest version, with the chosen values replaced by older ones."""
        if older is newest:
            return newest
        composed = new()
        composed.become(newest)
        self._tear_up(composed, older)
        if composed.checksums:
            composed.seal()
        return composed

    def _tear_up(self, composed: Snapshot, older: Snapshot) -> None:
        version = self._first_version + composed.version
        pairs = list(zip(composed.views, older.views, strict=True))
        if self._tear.unit == "tensor":
            for i in self._tear.choose(version, len(pairs)).tolist():
                pairs[i][0].copy_(pairs[i][1])
            return
        chosen = self._tear.choose(version, sum(view.numel() for view in composed.views))
        start = 0
        for view, old in pairs:
            stop = start + view.numel()
            first, last = torch.searchsorted(chosen, torch.tensor([start, stop])).tolist()
            where = chosen[first:last] - start
            view.view(-1)[where] = old.view(-1)[where]
            start = stop

    def commit(self, parcels: Sequence[Parcel], chosen: Sequence[Parcel]) -> None:
        for newest, workers in parcels:
            for worker in workers:
                sent = self._sent[worker]
                sent.append(newest)
                while len(sent) > 1 and sent[1].version <= of_age(self._tear.span, newest.version):
                    sent.popleft()

    def kept(self) -> list[Snapshot]:
        return [block for blocks in self._sent for block in blocks]
