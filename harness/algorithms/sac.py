"""Soft actor-critic, for continuous actions, on samples of a replay buffer."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch
from gymnasium.spaces import Box, Space
from tensordict import TensorDictBase
from tensordict.nn import interaction_type
from torch import Tensor, nn
from torch.nn.functional import softplus

from collectors.options.check_types import Count, Positive, Range, Share
from harness.algorithms.interface import ReplayAlgorithm, ReplayConfig, Setup, to_normalise
from harness.algorithms.optimisers import Adam, follow, seeded
from harness.errors import ConfigError
from harness.models.encoders import ACTIVATIONS, ImageConfig, encoder, flat, unflat
from harness.models.heads import normal_log_prob, wants_sample
from harness.models.normalise import Normaliser
from harness.options.run import ModelConfig
from harness.registry import algorithms

LOG_STD_RANGE = (-5.0, 2.0)


@dataclass
class SACConfig(ReplayConfig):
    """Soft actor-critic: off-policy, for continuous actions, on samples of a replay buffer."""

    name: str = "sac"
    learning_rate: Positive = 3e-4  # of the policy's Adam
    critic_learning_rate: Positive = 1e-3  # of the critics' Adam and the temperature's
    gamma: Share = 0.99  # discount
    # how far the target critics move to the critics in one update
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    policy_delay: Count = 2  # the policy takes this many steps after this many critic steps
    alpha: Positive = 1.0  # temperature: the weight of the entropy; its first value if automatic
    auto_alpha: bool = True  # adapt the temperature to the target entropy
    # in the units of actions; null: minus the number of dimensions for actions from -1 to 1, and
    # moved as far as other bounds are wider
    target_entropy: float | None = None
    # by running statistics, which travel with the weights; the first are of 1024 random actions
    normalise_observations: bool = False

    sampled_frames = property(to_normalise)

    def check(self, config: Any) -> None:
        super().check(config)
        if isinstance(config.model, ImageConfig):
            raise ConfigError(
                f"algo=sac model={config.model.name}: SAC reads vectors; use model=mlp"
            )


class SACPolicy(nn.Module):
    """The module that is sent to workers: a Gaussian, squashed into the bounds of the action space.

    normalise: whether to scale observations by running statistics, which are part of it.
    """

    scale: Tensor
    centre: Tensor

    def __init__(
        self,
        model: ModelConfig,
        observation_space: Space,
        action_space: Space,
        *,
        normalise: bool = False,
    ):
        super().__init__()
        if model.name != "mlp":
            raise ValueError(f"algo=sac learns with model=mlp, got model={model.name}")
        if not isinstance(action_space, Box) or action_space.dtype not in ("float32", "float64"):
            raise ValueError(f"algo=sac acts in Box spaces of floats, and this is {action_space}")
        low, high = action_space.low, action_space.high
        if not np.isfinite([low, high]).all() or not (low < high).all():
            raise ValueError(
                f"algo=sac needs finite bounds with low < high for every action, but this is "
                f"{action_space}"
            )
        self.in_keys = ["observation"]
        self.out_keys = ["action"]
        self.observation_dims = len(observation_space.shape or ())
        shape = tuple(observation_space.shape or ())
        self.normaliser = Normaliser(shape) if normalise else None
        self.encoder = encoder(model, observation_space)
        self.shape = action_space.shape
        self.output = nn.Linear(self.encoder.num_features, 2 * math.prod(self.shape))
        self.register_buffer("scale", torch.as_tensor((high - low) / 2).float().flatten())
        self.register_buffer("centre", torch.as_tensor((high + low) / 2).float().flatten())

    def forward(self, observation: Tensor) -> Tensor:
        """Act on observations [N, ...], as `tensordict.nn.interaction_type()` says."""
        mean, log_std = self.gaussian(self.prepare(observation))
        if wants_sample(interaction_type()):
            mean = mean + torch.randn_like(mean) * log_std.exp()
        return unflat(mean.tanh() * self.scale + self.centre, self.shape)

    def entropy(self, observation: Tensor) -> Tensor:
        """The entropy [N] of the actions, for an evaluation: estimated from one action each."""
        inputs = self.prepare(observation)
        noise = torch.randn(len(inputs), math.prod(self.shape), device=inputs.device)
        return -self.sample(inputs, noise)[1]

    def prepare(self, observation: Tensor) -> Tensor:
        """The observation as a vector of floats, normalised if that is asked for."""
        value = observation.float()
        if self.normaliser is not None:
            value = self.normaliser(value)
        return flat(value, self.observation_dims)

    def gaussian(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation before squashing."""
        mean, log_std = self.output(self.encoder(inputs)).chunk(2, dim=-1)
        low, high = LOG_STD_RANGE
        return mean, low + 0.5 * (high - low) * (log_std.tanh() + 1)

    def sample(self, inputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, n] made from standard normal `noise`, and their log-probabilities [N]."""
        mean, log_std = self.gaussian(inputs)
        raw = mean + noise * log_std.exp()
        log_prob = normal_log_prob(noise, log_std) - self.log_stretch(raw)
        return raw.tanh() * self.scale + self.centre, log_prob.sum(-1)

    def log_stretch(self, raw: Tensor) -> Tensor:
        """How much squashing and scaling stretch space at `raw`: the log of the derivative.

        log(1 - tanh(x)^2) in a form that stays exact where tanh(x) rounds to one.
        """
        return self.scale.log() + 2 * (math.log(2) - raw - softplus(-2 * raw))


class TwinCritics(nn.Module):
    """Two independent estimates of what an action is worth, computed side by side."""

    def __init__(self, model: ModelConfig, num_inputs: int):
        super().__init__()
        sizes = [num_inputs, *model.hidden_sizes, 1]
        self.activation = ACTIVATIONS[model.activation]()
        self.layers = nn.ParameterList()
        self.biases = nn.ParameterList()
        for inputs, outputs in pairwise(sizes):
            bound = 1 / math.sqrt(inputs)
            self.layers.append(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, inputs: Tensor, action: Tensor) -> Tensor:
        """Both estimates [2, N]."""
        both = torch.cat([inputs, action], dim=-1).expand(2, -1, -1)
        for number, (layer, bias) in enumerate(zip(self.layers, self.biases, strict=True)):
            both = torch.baddbmm(bias, self.activation(both) if number else both, layer)
        return both.squeeze(-1)


@algorithms.register("sac", options=SACConfig)
class SAC(ReplayAlgorithm):
    """The learner: holds `policy`, which is sent to workers, and improves it by replayed frames."""

    STATE = (
        "statistics",
        "policy",
        "critics",
        "target_critics",
        "log_alpha",
        "policy_optimiser",
        "critic_optimiser",
        "alpha_optimiser",
        "generator",
        "updates",
        "frames_owed",
        "policy_metrics",
    )

    def __init__(self, config: SACConfig, setup: Setup):
        self.config = config
        self.device = setup.device
        observations, actions = setup.observation_space, setup.action_space
        with seeded(setup.seed):
            self.policy = SACPolicy(
                setup.model, observations, actions, normalise=config.normalise_observations
            )
            size = math.prod(observations.shape or ()) + math.prod(self.policy.shape)
            self.critics = TwinCritics(setup.model, size)
        self.policy.to(self.device)
        self.statistics = self.policy.normaliser
        self.critics.to(self.device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        log_alpha = torch.tensor([math.log(config.alpha)], device=self.device)
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=config.auto_alpha)
        usual = float(self.policy.scale.log().sum()) - math.prod(self.policy.shape)
        target = config.target_entropy
        self.target_entropy = usual if target is None else target
        self.policy_optimiser = Adam(self.policy.parameters(), config.learning_rate)
        self.critic_optimiser = Adam(self.critics.parameters(), config.critic_learning_rate)
        self.alpha_optimiser = Adam([self.log_alpha], config.critic_learning_rate)
        self.generator = torch.Generator(self.device).manual_seed(setup.seed)
        self.updates = 0
        self.policy_metrics: dict[str, float] = {}  # of the last update of the policy

    def update(self, samples: TensorDictBase) -> dict[str, float]:
        """Learn once from replayed frames [N]."""
        samples = samples.to(self.device)
        inputs = self.policy.prepare(samples["observation"])
        metrics = self._update_critics(inputs, samples)
        self.updates += 1
        if self.updates % self.config.policy_delay == 0:
            for _ in range(self.config.policy_delay):
                self.policy_metrics = self._update_policy(inputs)
        follow(self.target_critics, self.critics, self.config.tau)
        metrics |= self.policy_metrics
        return {f"train/{name}": value for name, value in metrics.items()}

    def _update_critics(self, inputs: Tensor, samples: TensorDictBase) -> dict[str, float]:
        """Move the critics to reward plus what the target critics make of what followed."""
        next_inputs = self.policy.prepare(samples["next", "observation"])
        part = {
            "inputs": inputs,
            "action": flat(samples["action"].float(), len(self.policy.shape)),
            "next_inputs": next_inputs,
            "noise": self._noise(next_inputs),
            "terminated": samples["next", "terminated"],
            "reward": samples["next", "reward"],
        }
        metrics = self.critic_step(part)
        return {name: float(metrics[name]) for name in ("critic_loss", "q")}

    def critic_step(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """A gradient step of the critics."""
        loss, measured = self.critic_loss(part)
        self.critic_optimiser.step(loss)
        return measured

    def critic_loss(self, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The squared errors of both critics, and what to report of them."""
        with torch.no_grad():
            next_inputs = part["next_inputs"]
            next_action, next_log_prob = self.policy.sample(next_inputs, part["noise"])
            next_value = self.target_critics(next_inputs, next_action).amin(0)
            next_value = next_value - self.log_alpha.exp() * next_log_prob
            # A truncated episode would have gone on; a terminated one is worth nothing more.
            next_value = next_value.masked_fill(part["terminated"], 0)
            target = part["reward"] + self.config.gamma * next_value
        values = self.critics(part["inputs"], part["action"])
        loss = (values - target).square().mean(1).sum()
        return loss, {"critic_loss": loss.detach(), "q": values.detach().mean()}

    def _update_policy(self, inputs: Tensor) -> dict[str, float]:
        """Move the policy to what the critics like, and the temperature to the target entropy."""
        alpha = self.log_alpha.detach().exp()
        metrics = self.policy_step({"inputs": inputs, "noise": self._noise(inputs)})
        entropy = metrics["entropy"]
        if self.config.auto_alpha:
            excess = entropy - self.target_entropy
            self.alpha_optimiser.step((self.log_alpha.exp() * excess).sum())
        return {
            "policy_loss": float(metrics["policy_loss"]),
            "entropy": float(entropy),
            "alpha": float(alpha),
        }

    def policy_step(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """A gradient step of the policy."""
        loss, measured = self.policy_loss(part)
        self.policy_optimiser.step(loss)
        return measured

    def policy_loss(self, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """How far the policy is from what the critics like, and what to report of it."""
        alpha = self.log_alpha.detach().exp()
        action, log_prob = self.policy.sample(part["inputs"], part["noise"])
        loss = (alpha * log_prob - self.critics(part["inputs"], action).amin(0)).mean()
        return loss, {"policy_loss": loss.detach(), "entropy": -log_prob.detach().mean()}

    def _noise(self, inputs: Tensor) -> Tensor:
        shape = (len(inputs), math.prod(self.policy.shape))
        return torch.randn(shape, generator=self.generator, device=self.device)
