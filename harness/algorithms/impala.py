"""IMPALA: an actor-critic that learns from lagging data, corrected by V-trace.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", 2018. Losses are means over frames; the paper's are sums.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from harness.algorithms.actor_critic import View, actor_critic, view
from harness.algorithms.batches import network_rows
from harness.algorithms.interface import Ratios, Setup
from harness.algorithms.returns import Returns, Steps, explained_variance, vtrace
from harness.algorithms.state import Adam, Optimiser, RMSProp, seeded, weights
from harness.means import Means
from harness.options.algorithms import IMPALAConfig


class IMPALA:
    """The learner: holds `policy`, which is sent to workers, and improves it batch by batch.

    An annealed learning rate is zero after `setup.total_frames`.
    """

    def __init__(self, config: IMPALAConfig, setup: Setup):
        self.config = config
        self.sequence_length = getattr(setup.model, "sequence_length", 1)  # of recurrent models
        self.total_frames = setup.total_frames
        self.device = setup.device
        with seeded(setup.seed):
            self.policy, self.critic = actor_critic(config, setup)
        self.policy.to(self.device)
        self.critic.to(self.device)
        self.optimiser = self._make_optimiser()
        self.frames = 0  # consumed so far
        self.ratios: Ratios | None = None  # of the last update, at its start

    def _make_optimiser(self) -> Optimiser:
        config = self.config
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        if config.optimiser == "adam":
            return Adam(parameters, config.learning_rate, eps=1e-5)
        return RMSProp(
            parameters,
            config.learning_rate,
            alpha=config.rmsprop_alpha,
            eps=config.rmsprop_eps,
            momentum=config.rmsprop_momentum,
        )

    # -- one update

    def update(self, batch: TensorDictBase, version: int) -> dict[str, float]:
        """Learn from a batch [E, T] while the newest published weights are of `version`."""
        config, batch = self.config, batch.to(self.device)
        mask, versions = batch["collector", "mask"], batch["policy_version"]
        usable = mask & (versions >= 0)  # random actions have no probability
        if config.max_lag is not None:
            usable &= version - versions <= config.max_lag
        metrics = {
            "dropped": int((mask & ~usable).sum()),
            "learning_rate": self._anneal(int(mask.sum())),
            "gradient_steps": config.epochs if usable.any() else 0,
        }
        rows = network_rows(self.policy, batch)
        means = Means()
        for epoch in range(config.epochs):
            seen = view(self.policy, self.critic, batch, rows, self.sequence_length)
            log_ratio = seen.log_prob.detach() - batch["action_log_prob"]
            returns = self._returns(batch, seen, log_ratio)
            if epoch == 0:
                self.ratios = Ratios(log_ratio[usable], versions[usable])
                fit = explained_variance(returns.targets, seen.value.detach(), mask)
                metrics["explained_variance"] = fit
            if usable.any():
                loss, measured = self._loss(seen, returns, log_ratio, usable)
                norm = self.optimiser.step(loss, config.max_grad_norm)
                means.add({**measured, "grad_norm": norm})
        self.observe(batch["observation"][mask])  # for the next version, not for this one
        return {f"train/{name}": float(x) for name, x in (metrics | means.read()).items()}

    def _loss(
        self, seen: View, returns: Returns, log_ratio: Tensor, usable: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the usable frames, and what to report of it."""
        config = self.config
        weight = log_ratio[usable].exp().clamp(max=config.pg_rho_bar)
        gain = weight * returns.advantages[usable]
        policy_loss = -(gain * seen.log_prob[usable]).mean()
        value_loss = 0.5 * (seen.value - returns.targets)[usable].square().mean()
        entropy = self.policy.head.entropy(seen.parameters)[usable].mean()
        loss = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy
        return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}

    def _anneal(self, num_frames: int) -> float:
        left = 1.0 - self.frames / self.total_frames if self.config.anneal_learning_rate else 1.0
        self.frames += num_frames
        self.optimiser.learning_rate = self.config.learning_rate * max(0.0, left)
        return self.optimiser.learning_rate

    # -- what every frame was worth

    def _returns(self, batch: TensorDictBase, seen: View, log_ratio: Tensor) -> Returns:
        """V-trace targets, and advantages without the frame's own weight."""
        config, mask = self.config, batch["collector", "mask"]
        reward = batch["next", "reward"]
        if config.clip_rewards:
            reward = reward.clamp(-1, 1)
        terminated, value = batch["next", "terminated"], seen.value.detach()
        steps = Steps(reward, value, seen.next_value, terminated, seen.continues, mask)
        log_ratio = torch.where(batch["policy_version"] >= 0, log_ratio, 0)
        caps = {"rho": config.rho_bar, "c": config.c_bar}
        return vtrace(steps, log_ratio, gamma=config.gamma, lam=1.0, **caps)

    # -- checkpoints

    def observe(self, observations: Tensor) -> None:
        """Let observations [N, ...] move the statistics that observations are scaled by."""
        if self.policy.normaliser is not None:
            self.policy.normaliser.update(observations)

    def state_dict(self) -> dict[str, Any]:
        normaliser = self.policy.normaliser
        return {
            "policy": weights(self.policy),
            "critic": weights(self.critic),
            "optimiser": self.optimiser.state_dict(),
            "statistics": {} if normaliser is None else normaliser.statistics(),
            "frames": self.frames,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        self.optimiser.load_state_dict(state["optimiser"])
        if self.policy.normaliser is not None:
            self.policy.normaliser.load_statistics(state["statistics"])
        self.frames = state["frames"]
