"""Versions of the policy: as numbers, as UUIDs, and as counted by an outer collector."""

from __future__ import annotations

import uuid
from typing import Any
from uuid import UUID as UUIDType

import numpy as np
import torch
from torch import Tensor

INT, UUID = "int", "uuid"
_HALF = ">i8"  # of the bytes of a UUID


class PolicyVersion:
    """The form of versions: 0, 1, 2, … or a UUID for each, derived from the UUID of a run.

    Workers stamp frames with numbers; `stamp` turns these into UUIDs, as two 64-bit halves.
    """

    def __init__(self, version_type: str = INT, *, run: uuid.UUID | None = None):
        if version_type not in (INT, UUID):
            raise ValueError(f"version_type={version_type!r}: it is 'int' or 'uuid'")
        self.version_type = version_type
        self.run = run or uuid.uuid4()
        self.number = 0

    @classmethod
    def of(cls, track: object) -> PolicyVersion | None:
        """From the option `track_policy_version`."""
        if track is False:
            return None
        if isinstance(track, PolicyVersion):
            return track
        if track is True or track in (INT, UUID):
            return cls(INT if track is True else str(track))
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
        """The entry of a batch: these numbers, or the halves of their UUIDs, [..., 2]."""
        if self.version_type == INT:
            return numbers
        known, where = torch.unique(numbers, return_inverse=True)
        uuids = b"".join(self.uuid(int(number)).bytes for number in known)
        halves = np.frombuffer(uuids, _HALF).astype(np.int64).reshape(-1, 2)
        return torch.from_numpy(halves)[where]

    @staticmethod
    def read(halves: Tensor) -> UUIDType:
        """The UUID of one stamp."""
        return uuid.UUID(bytes=halves.numpy().astype(_HALF).tobytes())


class VersionMap:
    """The outer collector's version behind each version of an inner one that gets its weights."""

    def __init__(self) -> None:
        self._outer = np.zeros(64, np.int64)  # the first `_count` entries are in use
        self._count = 1
        self.newest = 0

    def note(self, inner: int, outer: int) -> None:
        """Note that the versions from `inner` on hold the outer collector's version `outer`."""
        count = max(self._count, inner + 1)
        if count > len(self._outer):  # room for as many again, so that few notes copy all
            self._outer = np.pad(self._outer, (0, 2 * count - len(self._outer)))
        self._outer[self._count : inner] = self.newest
        self._outer[inner:count] = outer
        self._count, self.newest = count, outer

    def translate(self, stamps: Tensor) -> Tensor:
        """The outer versions. Stamps of random actions are negative, and stay as they are."""
        inner = stamps.numpy()
        outer = self._outer[np.clip(inner, 0, self._count - 1)]
        return torch.from_numpy(np.where(inner < 0, inner, outer))

    def state_dict(self) -> dict[str, Any]:
        return {"outer": torch.from_numpy(self._outer[: self._count].copy()), "newest": self.newest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._outer, self.newest = state["outer"].numpy().copy(), int(state["newest"])
        self._count = len(self._outer)
