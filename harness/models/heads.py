"""Action heads: from features to a distribution over the actions of a space.

What a head makes of features are its distribution's parameters, which every method takes. They are
`distribution` of what `layer`, its only layer, puts out.
"""

from __future__ import annotations

import math

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from tensordict.nn import InteractionType
from torch import Tensor, nn

from harness.models.encoders import flat, orthogonal, unflat

LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)


def action_head(space: Space, num_features: int) -> CategoricalHead | GaussianHead:
    """The head for an action space: Discrete, MultiDiscrete or Box."""
    match space:
        case Discrete():
            return CategoricalHead(num_features, [int(space.n)], [int(space.start)], flat=True)
        case MultiDiscrete() if len(space.shape) == 1:
            return CategoricalHead(num_features, space.nvec.tolist(), space.start.tolist())
        case Box() if space.dtype in ("float32", "float64"):
            return GaussianHead(num_features, space)
    raise ValueError(
        f"the action space is {space}; policies act in Discrete, MultiDiscrete and Box (of floats)"
    )


def wants_sample(mode: InteractionType | None) -> bool:
    """Whether an interaction type asks for a random action, not for the most likely one."""
    return mode in (None, InteractionType.RANDOM)


def normal_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """The log-density of a Gaussian, `noise` standard deviations away from its mean."""
    return -0.5 * noise.square() - log_std - LOG_ROOT_TWO_PI


class CategoricalHead(nn.Module):
    """One choice among some, or several such choices side by side.

    choices: how many there are to choose from, each time. starts: the number of the first.
    flat: one choice is a number, not a vector of one number.
    """

    starts: Tensor

    def __init__(
        self, num_features: int, choices: list[int], starts: list[int], *, flat: bool = False
    ):
        super().__init__()
        self.choices = choices
        self.flat = flat
        self.from_zero = not any(starts)
        self.logits = orthogonal(nn.Linear(num_features, sum(choices)), gain=0.01)
        self.register_buffer("starts", torch.tensor(starts), persistent=False)

    @property
    def layer(self) -> nn.Module:
        return self.logits

    def forward(self, features: Tensor) -> Tensor:
        """The log-probability of every choice."""
        return self.distribution(self.logits(features))

    def distribution(self, logits: Tensor) -> Tensor:
        if self.flat:
            return logits.log_softmax(-1)
        return torch.cat([part.log_softmax(-1) for part in logits.split(self.choices, -1)], -1)

    def act(self, log_probs: Tensor, mode: InteractionType | None) -> Tensor:
        """A random action or the most likely one, as `mode` says."""
        score = log_probs
        if wants_sample(mode):
            # The largest of log-probability plus Gumbel noise is a sample.
            score = log_probs - torch.empty_like(log_probs).exponential_().log_()
        if self.flat:
            chosen = score.argmax(-1)
            return chosen if self.from_zero else chosen + self.starts[0]
        parts = [part.argmax(-1) for part in score.split(self.choices, -1)]
        return torch.stack(parts, -1) + self.starts

    def log_prob(self, log_probs: Tensor, action: Tensor) -> Tensor:
        action = action.long() if self.from_zero else action - self.starts
        if self.flat:
            return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        parts, chosen = log_probs.split(self.choices, -1), action.split(1, -1)
        gathered = [part.gather(-1, c) for part, c in zip(parts, chosen, strict=True)]
        return torch.cat(gathered, -1).sum(-1)

    def entropy(self, log_probs: Tensor) -> Tensor:
        return -(log_probs.exp() * log_probs).sum(-1)


class GaussianHead(nn.Module):
    """A Gaussian for each number of the action; its spread is learned, the same everywhere."""

    def __init__(self, num_features: int, space: Box):
        super().__init__()
        self.shape = space.shape
        size = math.prod(space.shape)
        self.mean = orthogonal(nn.Linear(num_features, size), gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(size))

    @property
    def layer(self) -> nn.Module:
        return self.mean

    def forward(self, features: Tensor) -> Tensor:
        """The mean."""
        return self.distribution(self.mean(features))

    def distribution(self, mean: Tensor) -> Tensor:
        return mean

    def act(self, mean: Tensor, mode: InteractionType | None) -> Tensor:
        """A random action or the mean, as `mode` says."""
        if wants_sample(mode):
            mean = mean + torch.randn_like(mean) * self.log_std.exp()
        return unflat(mean, self.shape)

    def log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        apart = (flat(action, len(self.shape)) - mean) * (-self.log_std).exp()
        return normal_log_prob(apart, self.log_std).sum(-1)

    def entropy(self, mean: Tensor) -> Tensor:
        return (self.log_std + 0.5 + LOG_ROOT_TWO_PI).sum().expand(mean.shape[:-1])
