"""IMPALA: an actor-critic that learns from lagging data, corrected by V-trace.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", 2018. Losses are means over frames; the paper's are sums.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from harness.algorithms.actor_critic import ActorCritic
from harness.algorithms.interface import Ratios, Setup
from harness.algorithms.objectives import mean
from harness.algorithms.returns import Steps, explained_variance, vtrace
from harness.algorithms.state import Adam, Optimiser, RMSProp
from harness.measures.means import Means
from harness.options.algorithms import IMPALAConfig


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
        present = self.present(batch, usable)
        counts = usable[present] if config.on_stale == "mask" else None
        metrics = {
            "dropped": int((mask & ~usable).sum()),
            "learning_rate": self.anneal(int(mask.sum())),
            "gradient_steps": config.epochs if usable.any() else 0,
        }
        rows, means = self.rows(batch), Means()
        reward, terminated = batch["next", "reward"], batch["next", "terminated"]
        if config.clip_rewards:
            reward = reward.clamp(-1, 1)
        caps = {"rho": config.rho_bar, "c": config.c_bar}
        for epoch in range(config.epochs):
            view = self.view(batch, rows, self.sequence_length)
            log_ratio = view.log_prob.detach() - batch["action_log_prob"]
            log_ratio = torch.where(versions >= 0, log_ratio, 0)  # 0 for random actions
            value = view.value.detach()
            steps = Steps(reward, value, view.next_value, terminated, view.continues, mask)
            advantages, targets = vtrace(steps, log_ratio, gamma=config.gamma, lam=1.0, **caps)
            if epoch == 0:
                self.ratios = Ratios(log_ratio[usable], versions[usable])
                metrics["explained_variance"] = explained_variance(targets, value, mask)
            if not usable.any():
                break
            weight = log_ratio[present].exp().clamp(max=config.pg_rho_bar)
            gain = weight * advantages[present] * view.log_prob[present]
            error = (view.value - targets)[present].square()
            entropies = self.policy.head.entropy(view.parameters)[present]
            policy_loss, value_loss = -mean(gain, counts), 0.5 * mean(error, counts)
            entropy = mean(entropies, counts)
            loss = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy
            norm = self.optimiser.step(loss, config.max_grad_norm)
            losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
            means.add({**losses, "grad_norm": norm})
        self.observe(batch["observation"][mask])  # for the next version, not for this one
        return {f"train/{name}": float(x) for name, x in (metrics | means.read()).items()}
