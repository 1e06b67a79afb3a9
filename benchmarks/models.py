"""The models whose weights every benchmark moves; imports only torch.

Peers run in their own environment, so this file is all that the two sides of a comparison share.
"""

import itertools

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
