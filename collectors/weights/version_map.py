"""Versions as an outer sender counts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


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
