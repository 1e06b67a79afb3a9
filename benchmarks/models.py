"""The models whose weights every benchmark moves, and how sends are timed; imports only torch.

Peers run in their own environment, so this file is all that the two sides of a comparison share.
"""

import itertools
import time
from collections.abc import Callable

import torch
from torch import nn

MODEL_WIDTHS: dict[str, tuple[int, ...]] = {
    "4.5k": (4, 64, 64, 2),  # 4,610 parameters: a CartPole policy
    "1M": (64, 960, 960, 16),  # 1,000,336 parameters
    "25M": (256, 3440, 3440, 3440, 128),  # 24,998,608 parameters, 100 MB
}


def build_model(name: str) -> nn.Sequential:
    """Build the float32 MLP called `name`, with the same initial weights each time."""
    if name not in MODEL_WIDTHS:
        raise ValueError(f"no model {name!r}: expected one of {', '.join(MODEL_WIDTHS)}")
    widths = MODEL_WIDTHS[name]
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for width_in, width_out in itertools.pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def timed_ms(call: Callable[[], object], count: int) -> list[float]:
    """How long each of `count` calls takes."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e3)
    return times


def timed_sends_ms(model: nn.Module, send: Callable[[], object], count: int) -> list[float]:
    """Change every weight, as a training step does, and send; only the sends are timed.

    NumPy changes them, because torch's threads spin for a while after they have helped.
    """
    weights = [parameter.detach().numpy() for parameter in model.parameters()]
    times = []
    for _ in range(count):
        for values in weights:
            values += 1e-3
        times += timed_ms(send, 1)
    return times


def corner_values(model: nn.Module) -> list[float]:
    """The last element of every parameter: enough to tell one version from another."""
    return [parameter.detach().view(-1)[-1].item() for parameter in model.parameters()]
