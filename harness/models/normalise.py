"""Running statistics that scale observations and rewards.

What a worker scales by is part of the policy's weights: it computes with what the learner had when
it published. The statistics behind that stay with the learner, since counts and variances grow
beyond any weight, and beyond what a wire format holds. Only the learner moves them, with `update`;
a forward never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

LIMIT = 10.0  # no normalised number is further from zero
EPSILON = 1e-8


class Normaliser(nn.Module):
    """Scales by the mean and spread of all that it was updated with; does nothing before that.

    centre: whether to subtract the mean, too.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...] = (), *, centre: bool = True):
        super().__init__()
        self.centre = centre
        self.count = 0
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.variance = torch.ones(shape, dtype=torch.float64)
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, value: Tensor) -> Tensor:
        if self.centre:
            value = value - self.shift
        return (value * self.scale).clamp(-LIMIT, LIMIT)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Take values [N, ...] into account."""
        new = len(values)
        if not new:
            return
        variance, mean = torch.stack(torch.var_mean(values.double(), dim=0, correction=0)).cpu()
        total = self.count + new
        apart = mean - self.mean
        squares = self.variance * self.count + variance * new
        squares = squares + apart.square() * self.count * new / total
        self._scale_by(total, self.mean + apart * new / total, squares / total)

    def _scale_by(self, count: int, mean: Tensor, variance: Tensor) -> None:
        self.count, self.mean, self.variance = count, mean, variance
        self.shift.copy_(mean)
        self.scale.copy_((variance + EPSILON).rsqrt())

    def statistics(self) -> dict[str, Any]:
        """What a later process needs to go on from here."""
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load_statistics(self, state: Mapping[str, Any]) -> None:
        self._scale_by(int(state["count"]), state["mean"], state["variance"])
