"""IMPALA: an actor-critic that learns from lagging data, corrected by V-trace.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", 2018. Losses are means over frames; the paper's are sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from collectors.options.check_types import Count, NonNegative, NonNegativeInt, Positive, Share
from harness.algorithms.actor_critic import ActorCritic, Stale, as_means_of_counted
from harness.algorithms.interface import Setup, to_normalise
from harness.algorithms.objectives import mean
from harness.algorithms.optimisers import Adam, Optimiser, RMSProp
from harness.algorithms.returns import Steps, explained_variance, vtrace
from harness.measures import Means
from harness.measures.meters import Ratios
from harness.options.base import linked
from harness.options.run import AlgorithmConfig
from harness.registry import algorithms


@dataclass
class IMPALAConfig(AlgorithmConfig):
    """IMPALA, an actor-critic with V-trace: one gradient step on each batch, corrected for lag."""

    name: str = "impala"
    optimiser: Literal["rmsprop", "adam"] = "rmsprop"  # the gradient method
    learning_rate: Positive = 6e-4  # of the optimiser
    anneal_learning_rate: bool = True  # linearly, to zero at the last frame
    rmsprop_alpha: Share = 0.99  # optimiser=rmsprop: decay of the running mean square
    # optimiser=rmsprop: added to the root of the mean square. Losses are means over frames: divide
    # values meant for sums, as in the paper, by the frames of a batch
    rmsprop_eps: Positive = 1e-5
    rmsprop_momentum: Share = 0.0  # optimiser=rmsprop: momentum
    epochs: Count = 1  # gradient steps on each batch, each with all of its frames
    gamma: Share = 0.99  # discount
    rho_bar: Positive = 1.0  # V-trace: cap on the weight of a frame's own error
    c_bar: Positive = 1.0  # V-trace: cap on the weight with which later errors are passed back
    pg_rho_bar: Positive = 1.0  # cap on a frame's weight in the policy gradient
    entropy_weight: NonNegative = 0.01  # weight of the entropy bonus
    value_weight: NonNegative = 0.5  # weight of the value loss
    max_grad_norm: NonNegative = 0.5  # of all gradients together; 0: no limit
    # the gradient step (loss, gradient, clipping, optimiser), by torch.compile: a slower start,
    # then faster updates; not for models with memory
    compile: bool = False
    clip_rewards: bool = False  # learn from rewards clipped to -1..1; logged returns do not change
    normalise_observations: bool = False  # by running statistics, which travel with the weights
    # versions; frames that lag more are not learned from, and counted
    max_lag: NonNegativeInt | None = field(default=None, metadata=linked("${sync.max_lag}"))
    # drop: such frames are left out; mask: they stay in minibatches and trajectories, weightless
    on_stale: Stale = field(default="drop", metadata=linked("${sync.on_stale}"))

    sampled_frames = property(to_normalise)


@algorithms.register("impala", options=IMPALAConfig)
class IMPALA(ActorCritic):
    """The learner: holds `policy`, which is sent to workers, and improves it batch by batch."""

    config: IMPALAConfig

    def __init__(self, config: IMPALAConfig, setup: Setup):
        super().__init__(config, setup)
        self.optimiser = self._make_optimiser()

    def _make_optimiser(self) -> Optimiser:
        config = self.config
        if config.optimiser == "adam":
            return Adam(self.parameters, config.learning_rate, eps=1e-5)
        return RMSProp(
            self.parameters,
            config.learning_rate,
            alpha=config.rmsprop_alpha,
            eps=config.rmsprop_eps,
            momentum=config.rmsprop_momentum,
        )

    def update(self, batch: TensorDictBase, version: int) -> dict[str, float]:
        """Learn from a batch [E, T] while the newest published weights are of `version`."""
        config, batch = self.config, batch.to(self.device)
        mask, versions = batch["collector", "mask"], batch["policy_version"]
        usable = self.usable(batch, version)
        metrics = {
            "dropped": int((mask & ~usable).sum()),
            "learning_rate": self.anneal(int(mask.sum())),
            "gradient_steps": config.epochs if usable.any() else 0,
        }
        part, means = self.part(batch, usable), Means()
        for epoch in range(config.epochs):
            measured = self.step(part) if usable.any() else self.loss(part)[1]
            log_ratio, targets, value = (measured.pop(x) for x in ("log_ratio", "targets", "value"))
            if epoch == 0:
                self.ratios = Ratios(log_ratio[usable], versions[usable])
                metrics["explained_variance"] = explained_variance(targets, value, mask)
            if not usable.any():
                break
            means.add(measured)
        self.observe(batch["observation"][mask])  # for the next version, not for this one
        return {
            f"train/{name}": float(x)
            for name, x in (metrics | as_means_of_counted(means.read())).items()
        }

    def part(self, batch: TensorDictBase, usable: Tensor) -> dict[str, Tensor]:
        """What the loss is computed from: rows [E, T], and the places of frames to learn from."""
        present = self.present(batch, usable)
        part = self.rows(batch) | self.following(batch)
        reward = batch["next", "reward"]
        part["reward"] = reward.clamp(-1, 1) if self.config.clip_rewards else reward
        part["terminated"] = batch["next", "terminated"]
        part["mask"] = batch["collector", "mask"]
        part["behaviour"] = batch["action_log_prob"]
        part["is_random"] = batch["policy_version"] < 0
        part["places"] = present.flatten().nonzero().squeeze(1)
        if self.config.on_stale == "mask":
            part["counts"] = usable[present]
        return part

    def loss(self, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and what to report of it."""
        config, counts = self.config, part.get("counts")
        view = self.view(part, self.sequence_length)
        log_ratio = view.log_prob.detach() - part["behaviour"]
        log_ratio = torch.where(part["is_random"], 0, log_ratio)
        value = view.value.detach()
        steps = Steps(
            part["reward"], value, view.next_value, part["terminated"], view.continues, part["mask"]
        )
        caps = {"rho": config.rho_bar, "c": config.c_bar}
        advantages, targets = vtrace(steps, log_ratio, gamma=config.gamma, lam=1.0, **caps)

        def present(values: Tensor) -> Tensor:
            return values.flatten(0, 1)[part["places"]]

        weight = present(log_ratio).exp().clamp(max=config.pg_rho_bar)
        gain = weight * present(advantages) * present(view.log_prob)
        error = present(view.value - targets).square()
        policy_loss, value_loss = -mean(gain, counts), 0.5 * mean(error, counts)
        entropy = mean(present(self.policy.head.entropy(view.parameters)), counts)
        loss = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy
        losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        if counts is not None:
            losses["counted_share"] = counts.float().mean()
        frames = {"log_ratio": log_ratio, "targets": targets, "value": value}
        return loss, losses | frames
