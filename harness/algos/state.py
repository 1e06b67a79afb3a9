"""What the algorithms share about their own state: seeds, and optimisers as plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw initial weights from `seed`, and leave the global random stream where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimiser's memory as named tensors; nothing before its first step."""
    return {
        f"{number}.{name}": value
        for number, memory in optimiser.state_dict()["state"].items()
        for name, value in memory.items()
    }


def load_optimiser(optimiser: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """Give an optimiser back what `optimiser_state` took from it."""
    memory: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        number, name = key.split(".", 1)
        memory.setdefault(int(number), {})[name] = value.clone()
    optimiser.load_state_dict({**optimiser.state_dict(), "state": memory})
