"""A policy whose weights all hold one number, the version: any mixture of versions shows."""

import torch
from torch import Tensor, nn


class VersionedPolicy(nn.Module):
    """Six tensors, four parameters and two buffers, of up to `width * width` elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for index in range(2):
            self.register_parameter(f"weight_{index}", nn.Parameter(torch.empty(width, width)))
            self.register_parameter(f"bias_{index}", nn.Parameter(torch.empty(width)))
        self.register_buffer("scale", torch.empty(width, width))
        self.register_buffer("shift", torch.empty(width))
        self.set_version(0)

    @torch.no_grad()
    def set_version(self, version: int) -> None:
        """Change every weight in place, as an optimiser step does."""
        for tensor in self.state_dict(keep_vars=True).values():
            tensor.fill_(version)

    @torch.no_grad()
    def forward(self) -> Tensor:
        """One policy call: read each tensor once; return the smallest and largest value of each."""
        ranges = [torch.aminmax(t) for t in (*self.parameters(), *self.buffers())]
        return torch.stack([torch.stack(tuple(low_high)) for low_high in ranges])


class VersionedCartPolePolicy(nn.Module):
    """The same as a policy for CartPole: random actions, and the range of its own weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = VersionedPolicy(width)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return an action, the smallest and the largest weight that this very call saw."""
        seen = self.weights()
        batch = observation.shape[:-1]
        action = torch.randint(2, batch)
        return action, seen.min().expand(batch).clone(), seen.max().expand(batch).clone()
