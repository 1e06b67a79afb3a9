"""The probe of the promise suite for formats that round what travels."""

from __future__ import annotations

import functools

import torch

from tests.promises.probe import VersionPolicy, read

ROUND = 128  # whole numbers below it come back from every format, once rounded


class CoarsePolicy(VersionPolicy):
    """Says its number where every bit arrives, and the number's remainder where floats travel."""

    def hold(self, number: int) -> None:
        super().hold(number)
        with torch.no_grad():
            for tensor in (*self.parameters(), self.mean):
                tensor.fill_(number % ROUND)

    def forward(self) -> tuple[float, float]:
        number, exact = self.extra, torch.aminmax(self.steps)
        numbers = {number, int(exact.min), int(exact.max)}
        for tensor in (*self.parameters(), self.mean):
            low, high = torch.aminmax(tensor.detach().round())
            if (low, high) != (number % ROUND, number % ROUND):
                numbers |= {-1}
        return float(min(numbers)), float(max(numbers))


def be_coarse(policy: VersionPolicy) -> None:
    """Have the trainer hold what the workers look for."""
    policy.__class__ = CoarsePolicy


# As `read`, with a policy that does not mind rounding.
read_coarsely = functools.partial(read, make=CoarsePolicy)
