"""The probe of the promise suite for formats that round what travels."""

from __future__ import annotations

import torch

from sync import WeightSyncScheme
from tests.promises.probe import STOP, Findings, VersionPolicy, call

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


def read_coarsely(
    scheme: WeightSyncScheme, worker: int, findings: Findings, width: int, background: bool = False
) -> None:
    """As the probe's `read`, with a policy that does not mind rounding."""
    torch.set_num_threads(1)
    policy = CoarsePolicy(width)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect(background=background)
    while not findings.get(worker, STOP):
        call(scheme, policy, worker, findings, background)
    scheme.shutdown()
