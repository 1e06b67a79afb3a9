"""The version of the policy: as a number, as a UUID, and as those above count it."""

from __future__ import annotations

import uuid
from typing import Any
from uuid import UUID as UUIDType

import numpy as np
import torch
from torch import Tensor

INT, UUID = "int", "uuid"


class PolicyVersion:
    """How versions are shown: 0, 1, 2, … or a UUID for each, derived from a run's own.

    Frames carry the number in any case; `stamp` turns numbers into UUIDs, as two 64-bit halves.
    """

    def __init__(self, version_type: str = INT, *, run: uuid.UUID | None = None):
        if version_type not in (INT, UUID):
            raise ValueError(f"version_type={version_type!r}: it is 'int' or 'uuid'")
        self.version_type = version_type
        self.run = run or uuid.uuid4()
        self.number = 0

    @classmethod
    def of(cls, track: object) -> PolicyVersion | None:
        """From what `track_policy_version` may be: False, True, "int", "uuid" or one of these."""
        if track is False or track is None:
            return None
        if isinstance(track, PolicyVersion):
            return track
        if track is True:
            return cls()
        if track in (INT, UUID):
            return cls(str(track))
        raise ValueError(
            f"track_policy_version={track!r}: it is True, False, 'int', 'uuid' or a PolicyVersion"
        )

    @property
    def version(self) -> int | str:
        """The newest published version."""
        return self.number if self.version_type == INT else str(self.uuid(self.number))

    def uuid(self, number: int) -> UUIDType:
        """The UUID of a version."""
        return uuid.uuid5(self.run, str(number))

    def stamp(self, numbers: Tensor) -> Tensor:
        """What a batch shows: the numbers themselves, or [..., 2] halves of their UUIDs."""
        if self.version_type == INT:
            return numbers
        known, where = torch.unique(numbers, return_inverse=True)
        halves = [_halves(self.uuid(int(number))) for number in known]
        return torch.tensor(halves, dtype=torch.int64).reshape(-1, 2)[where]

    @staticmethod
    def read(halves: Tensor) -> UUIDType:
        """The UUID of one stamp."""
        high, low = (int(half) & _MASK for half in halves)
        return uuid.UUID(int=high << 64 | low)


class VersionMap:
    """The version of those above behind each version of a collector whose weights they send."""

    def __init__(self) -> None:
        self._outer = np.zeros(1, np.int64)
        self.newest = 0

    def note(self, inner: int, outer: int) -> None:
        """The collector's version `inner`, and all after it, hold the `outer` of those above."""
        grown = self._outer
        if inner >= len(grown):
            grown = np.full(max(inner + 1, 2 * len(self._outer)), self._outer[-1])
            grown[: len(self._outer)] = self._outer
        grown[inner:] = outer
        self._outer, self.newest = grown, outer

    def translate(self, stamps: Tensor) -> Tensor:
        """The versions of those above; random actions have none."""
        inner = stamps.numpy()
        return torch.from_numpy(np.where(inner < 0, inner, self._outer[np.maximum(inner, 0)]))

    def state_dict(self) -> dict[str, Any]:
        return {"outer": torch.from_numpy(self._outer.copy()), "newest": self.newest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._outer, self.newest = state["outer"].numpy().copy(), int(state["newest"])


_MASK = (1 << 64) - 1


def _halves(value: uuid.UUID) -> tuple[int, int]:
    high, low = value.int >> 64, value.int & _MASK
    return _signed(high), _signed(low)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
