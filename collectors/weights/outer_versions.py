"""A collector in a chain: it receives weights from an outer sender, and publishes them further."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.weights.model_ids import POLICY
from sync import WeightSyncScheme


class Chain:
    """The schemes that receive, and the outer sender's version behind each version published here.

    newest: the outer version last published here.
    """

    def __init__(self) -> None:
        self.schemes: dict[str, WeightSyncScheme] = {}
        self.newest = 0
        self._outer = np.zeros(64, np.int64)  # the first `_count` entries are in use
        self._count = 1

    def add(self, model_id: str, scheme: WeightSyncScheme, collector: Any) -> None:
        """Receive the weights of one more model of this collector's policy."""
        scheme.init_on_receiver(
            model_id=model_id, context=collector, worker_idx=collector.worker_idx
        )
        self.schemes[model_id] = scheme
        scheme.connect(background=False)

    def receive(self, timeout: float | None) -> bool:
        """Apply weights that arrived; whether there were any."""
        received = [scheme.receive(timeout) for scheme in self.schemes.values()]
        return any(weights is not None for weights in received)

    def note_published(self, version: int) -> None:
        """The versions published here from this one on have the weights received last."""
        main = self.schemes.get(POLICY) or next(iter(self.schemes.values()))
        self.note(version, max(0, main.version))

    def note(self, inner: int, outer: int) -> None:
        """The versions published here from `inner` on hold the outer version `outer`."""
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

    def shutdown(self) -> None:
        """End the connections to the outer sender."""
        with contextlib.ExitStack() as after:
            for scheme in self.schemes.values():
                after.callback(scheme.shutdown)
