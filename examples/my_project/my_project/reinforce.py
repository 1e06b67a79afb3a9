"""REINFORCE: the policy gradient of whole returns, less a baseline.

    update(batch [E, T])
      returns    the discounted rewards from each frame to the end of its episode
      advantage  the return less the baseline, to mean 0 and variance 1 in the batch
      loss       -log_prob(action) * advantage, in one gradient step on the batch

`baseline=value` learns the value of observations. It also stands in for the rewards after the
batch where the batch cuts an episode. `baseline=mean` subtracts the mean return of the batch, and
learns only from episodes that end within the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import interaction_type
from torch import Tensor, nn

from collectors import next_observations
from harness.algorithms.interface import Algorithm, Setup
from harness.algorithms.optimisers import Adam, seeded
from harness.algorithms.returns import continues, discounted
from harness.models.encoders import encoder, flat
from harness.models.heads import action_head
from harness.options import (
    AlgorithmConfig,
    ConfigError,
    NonNegative,
    NonNegativeInt,
    Positive,
    Share,
)
from harness.options.base import linked
from harness.registry import algorithms


@dataclass
class ReinforceConfig(AlgorithmConfig):
    """REINFORCE with a baseline: on-policy, one gradient step for each batch."""

    name: str = "reinforce"
    learning_rate: Positive = 1e-3  # of Adam
    gamma: Share = 0.99  # discount
    # what is subtracted from returns: the learned value of the observation, or their mean
    baseline: Literal["value", "mean"] = "value"
    value_weight: NonNegative = 0.5  # weight of the value loss
    entropy_weight: NonNegative = 0.01  # weight of the entropy bonus
    max_grad_norm: NonNegative = 1.0  # of all gradients together; 0: no limit
    # versions; frames that lag more are dropped, and counted
    max_lag: NonNegativeInt | None = field(default=None, metadata=linked("${sync.max_lag}"))

    def check(self, config: Any) -> None:
        if config.model.recurrent:
            raise ConfigError(
                f"algo=reinforce model={config.model.name}: it keeps no state; use model=mlp"
            )
        if config.collector.fills_replay_buffer:
            raise ConfigError(
                "collector.free_running=true algo=reinforce: it has no replay buffer to fill; "
                "use algo=sac"
            )


class ReinforcePolicy(nn.Module):
    """What acts, and what workers get: observations to actions."""

    def __init__(self, setup: Setup):
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.observation_dims = len(setup.observation_space.shape or ())
        self.encoder = encoder(setup.model, setup.observation_space)
        self.head = action_head(setup.action_space, self.encoder.num_features)

    def forward(self, observation: Tensor) -> Tensor:
        """Act on observations [N, ...], as `tensordict.nn.interaction_type()` says."""
        parameters = self.head(self.encoder(self.prepare(observation)))
        return self.head.act(parameters, interaction_type())

    def prepare(self, observation: Tensor) -> Tensor:
        """What the encoder is given: a vector of floats, or an image as it is."""
        if self.encoder.reads_images:
            return observation
        return flat(observation.float(), self.observation_dims)


@algorithms.register("reinforce", options=ReinforceConfig)
class Reinforce(Algorithm):
    """The learner: holds `policy`, which is sent to workers, and improves it batch by batch."""

    STATE = ("policy", "value", "optimiser")  # what a checkpoint holds

    def __init__(self, config: ReinforceConfig, setup: Setup):
        self.config = config
        self.device = setup.device
        with seeded(setup.seed):
            self.policy = ReinforcePolicy(setup)
            own_encoder = encoder(setup.model, setup.observation_space)
            self.value = nn.Sequential(own_encoder, nn.Linear(own_encoder.num_features, 1))
        self.policy.to(self.device)
        self.value.to(self.device)
        parameters = [*self.policy.parameters(), *self.value.parameters()]
        self.optimiser = Adam(parameters, config.learning_rate)

    def update(self, batch: TensorDictBase, version: int) -> dict[str, float]:
        """Learn from a batch [E, T] while the newest published weights are of `version`."""
        config = self.config
        batch = batch.to(self.device)
        mask = batch["collector", "mask"]  # a batch may hold padding
        returns, usable = self._returns(batch, mask)
        fresh = torch.ones_like(mask)
        if config.max_lag is not None:
            fresh = version - batch["policy_version"] <= config.max_lag
        usable &= fresh
        metrics = {
            "train/frames": float(usable.sum()),
            "train/dropped": float((mask & ~fresh).sum()),
        }
        if not usable.any():
            return metrics

        inputs, target = self.policy.prepare(batch["observation"][usable]), returns[usable]
        value = self.value(inputs).squeeze(-1)
        baseline = value.detach() if config.baseline == "value" else target.mean()
        advantage = target - baseline
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        head = self.policy.head
        parameters = head(self.policy.encoder(inputs))
        policy_loss = -(head.log_prob(parameters, batch["action"][usable]) * advantage).mean()
        value_loss = 0.5 * (value - target).square().mean()
        entropy = head.entropy(parameters).mean()
        value_weight = config.value_weight if config.baseline == "value" else 0.0
        loss = policy_loss - config.entropy_weight * entropy + value_weight * value_loss
        norm = self.optimiser.step(loss, config.max_grad_norm)
        return metrics | {
            "train/policy_loss": float(policy_loss.detach()),
            "train/value_loss": float(value_loss.detach()),
            "train/entropy": float(entropy.detach()),
            "train/grad_norm": float(norm),
        }

    @torch.no_grad()
    def _returns(self, batch: TensorDictBase, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The return of each frame [E, T], and which frames have one to learn from."""
        done, gamma = batch["next", "done"], self.config.gamma
        goes_on = continues(done, batch["collector", "traj_ids"], mask)
        reward = torch.where(mask, batch["next", "reward"], 0.0)
        if self.config.baseline == "value":
            cut = mask & ~goes_on & ~batch["next", "terminated"]
            after = self.policy.prepare(next_observations(batch, cut))
            reward[cut] += gamma * self.value(after).squeeze(-1)
            usable = mask
        else:
            usable = discounted((done & mask).float(), goes_on.float()) > 0  # an end follows
        usable = usable & (batch["policy_version"] >= 0)  # an action of the policy's, not a random
        return discounted(reward, gamma * goes_on), usable
