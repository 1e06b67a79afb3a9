"""What the learners do with batches that is no part of any algorithm: cutting and averaging."""

from __future__ import annotations

import torch
from torch import Tensor


def sequences(rows: dict[str, Tensor], usable: Tensor, length: int) -> dict[str, Tensor]:
    """Cut rows [E, T] into sequences [S, length], each with the state that it begins with.

    Those without a usable frame are left out; "mask" says which frames of the others to learn from.
    """
    num_frames = usable.shape[1]
    padding = -num_frames % length
    cut = {}
    for key, value in {**rows, "mask": usable}.items():
        padded = torch.cat([value, value[:, -1:].expand(-1, padding, *value.shape[2:])], dim=1)
        cut[key] = padded.unflatten(1, (-1, length)).flatten(0, 1)
    if padding:
        cut["mask"].unflatten(0, (len(usable), -1))[:, -1, -padding:] = False
    cut["state"] = cut["state"][:, 0]
    chosen = cut["mask"].any(1)
    return {key: value[chosen] for key, value in cut.items()}


class Means:
    """Means of measurements, which are only looked at in the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, measured: dict[str, Tensor]) -> None:
        for name, value in measured.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if self._count else value
        self._count += 1

    def means(self) -> dict[str, float]:
        return {name: float(total) / self._count for name, total in self._sums.items()}
