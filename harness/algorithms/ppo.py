"""Proximal policy optimisation, for fresh data and for data that lags behind the learner.

    update
      assess           a batch [E, T]: log-probabilities and values by the present networks
        returns        advantages and targets: returns.py
      for each epoch, for each of `minibatches`:
        loss           objectives.py has what is maximised
        step           the gradient, clipped, and Adam: actor_critic.py, with the networks

Read these two files and returns.py first; minibatches.py cuts rows for recurrent policies and for
objectives of whole trajectories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from gymnasium.spaces import Box
from tensordict import TensorDictBase
from torch import Tensor

from collectors.options.check_types import Count, NonNegative, NonNegativeInt, Positive, Share
from harness.algorithms.actor_critic import ActorCritic, Stale, as_means_of_counted
from harness.algorithms.interface import Setup, to_normalise
from harness.algorithms.minibatches import layout
from harness.algorithms.objectives import Frames, Objective, kl_estimate, mean, objective
from harness.algorithms.optimisers import Adam, Averaged
from harness.algorithms.returns import (
    DiscountedReturns,
    Returns,
    Steps,
    explained_variance,
    gae,
    vtrace,
)
from harness.errors import ConfigError, show
from harness.measures import Means
from harness.measures.meters import Ratios
from harness.models.normalise import Normaliser
from harness.options.base import linked
from harness.options.run import AlgorithmConfig
from harness.registry import algorithms
from lockstep_check.ages import age

OF_VALUES = ("value_loss", "explained_variance")


@dataclass
class PPOConfig(AlgorithmConfig):
    """Proximal policy optimisation: on-policy, with options for lagging data."""

    critic: ClassVar[bool] = True  # whether it learns values; else nothing is reported of them

    name: str = "ppo"
    learning_rate: Positive = 2.5e-4  # of Adam
    anneal_learning_rate: bool = True  # linearly, to zero at the last frame
    epochs: Count = 4  # passes over each batch
    minibatch_size: Count = 256  # frames in one gradient step, approximately: a batch is cut evenly
    # draw minibatches at random; false: in the order in which frames were made, so that a minibatch
    # holds whole groups of algo=grpo if their episodes run beside each other
    shuffle: bool = True
    gamma: Share = 0.99  # discount
    gae_lambda: Share = 0.95  # 0: one-step returns; 1: whole returns
    clip: Positive = 0.2  # how far a probability ratio may move from one
    clip_high: Positive | None = None  # and upwards, if that is another distance (DAPO: 0.28)
    clip_value: bool = True  # keep value predictions within `clip` of the old ones, too
    normalise_advantages: bool = True  # to mean 0 and variance 1 in each minibatch
    entropy_weight: NonNegative = 0.01  # weight of the entropy bonus
    value_weight: NonNegative = 0.5  # weight of the value loss
    max_grad_norm: NonNegative = 0.5  # of all gradients together; 0: no limit
    # end a batch's epochs once the policy is this far from what it was at the start of the update
    target_kl: Positive | None = None
    # by running statistics, which travel with the weights; the first are of 1024 random actions
    normalise_observations: bool = False
    normalise_rewards: bool = False  # by the running spread of the discounted return
    # what an update maximises, a registered objective or {name: {options}}: clipped against the
    # weights that acted (behaviour, dual_clip, gspo, geometric), against the learner's own at the
    # start of the update (proximal, decoupled, ewma, a3po), or not clipped (vtrace, truncated_is,
    # cispo, m2po, dppo, sapo, vcpo, vaco, sequence_is, vespo)
    objective: str | dict[str, Any] = "behaviour"
    # the gradient step (loss, gradient, clipping, optimiser), by torch.compile: a slower start,
    # then faster updates; not for models with memory
    compile: bool = False
    # V-trace returns, corrected for lag, instead of GAE; true with an objective that needs them
    vtrace: bool = field(default=False, metadata=linked("${lockstep.vtrace:${algo.objective}}"))
    vtrace_rho: Positive = 1.0  # V-trace: cap on the weight of a frame's own error
    vtrace_c: Positive = 1.0  # V-trace: cap on the weight with which later errors are passed back
    # versions; frames that lag more are not learned from, and counted
    max_lag: NonNegativeInt | None = field(default=None, metadata=linked("${sync.max_lag}"))
    # drop: such frames are left out; mask: they stay in minibatches and trajectories, weightless
    on_stale: Stale = field(default="drop", metadata=linked("${sync.on_stale}"))

    sampled_frames = property(to_normalise)

    def check(self, config: Any) -> None:
        super().check(config)
        objective(self)

    def warnings(self, config: Any) -> list[str]:
        name = self.objective if isinstance(self.objective, str) else next(iter(self.objective))
        if name != "proximal" or not config.cause_of_lag:
            return []
        return [
            f"algo.objective=proximal with {config.cause_of_lag}: its ratio is to the learner's "
            "policy at the start of the update, which is not the one that acted; behaviour and "
            "decoupled correct for that"
        ]


@algorithms.register("ppo", options=PPOConfig)
class PPO(ActorCritic):
    """The learner: holds `policy`, which is sent to workers, and improves it batch by batch.

    What `assess` returns of each frame, as `minibatches` yields it and `loss` reads it:

        inputs, action                 what the networks read, and what was done
        state, starts                  of recurrent policies
        behaviour, proximal            log-probability of the action: acting weights, learner's
        old_value, advantage, target   by the learner's networks at the start of the update
        trajectory, age                numbers of its trajectory, and of versions that it lags
        counts                         with on_stale=mask: whether it has a weight
        time                           with shuffle=false: its place in the row
    """

    STATE = (*ActorCritic.STATE, "averaged", "generator", "discounted_rewards")
    config: PPOConfig

    def __init__(self, config: PPOConfig, setup: Setup):
        super().__init__(config, setup)
        self.objective = objective(config)
        check_objective(self.objective, config, setup)
        self.optimiser = Adam(self.parameters, config.learning_rate, eps=1e-5)
        decay = getattr(self.objective.options, "proximal_decay", None)
        self.averaged = None if decay is None else Averaged(self.policy, decay)
        self.generator = torch.Generator().manual_seed(setup.seed)
        self.reward_normaliser = Normaliser(centre=False).to(self.device)
        self.discounted_rewards = DiscountedReturns(config.gamma)
        self.statistics = {"rewards": self.reward_normaliser}
        if self.policy.normaliser is not None:
            self.statistics["observations"] = self.policy.normaliser
        self.layout = layout(
            recurrent=self.policy.is_recurrent,
            whole_trajectories=self.objective.needs("whole_trajectories"),
            length=self.sequence_length,
        )

    def update(self, batch: TensorDictBase, version: int) -> dict[str, float]:
        """Learn from a batch [E, T] while the newest published weights are of `version`."""
        config, batch = self.config, batch.to(self.device)
        mask = batch["collector", "mask"]
        frames, metrics = self.assess(batch, version)
        metrics["learning_rate"] = self.anneal(int(mask.sum()))
        means = Means()
        epochs = gradient_steps = 0
        num_epochs = config.epochs if len(frames["action"]) else 0  # all may be too old
        for _ in range(num_epochs):
            epochs += 1
            kl = Means()
            for part in self.minibatches(frames):
                measured = self.step(part)
                if self.averaged is not None:
                    self.averaged.follow(self.policy)
                gradient_steps += 1
                means.add(measured)
                if config.target_kl is not None:
                    kl.add({"kl": measured["update_kl"]})
            if config.target_kl is not None and kl.read()["kl"] > config.target_kl:
                break
        # For the next version, not for this one: the update saw observations scaled as the workers
        # of the present version see them.
        self.observe(batch["observation"][mask])
        metrics |= as_means_of_counted(means.read()) | {
            "epochs": epochs,
            "gradient_steps": gradient_steps,
        }
        if not config.critic:
            metrics = {name: x for name, x in metrics.items() if name not in OF_VALUES}
        return {f"train/{name}": float(value) for name, value in metrics.items()}

    @torch.no_grad()
    def assess(
        self, batch: TensorDictBase, version: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The frames to learn from, with advantages, targets and the learner's view of them."""
        config, mask, versions = self.config, batch["collector", "mask"], batch["policy_version"]
        usable, rows = self.usable(batch, version), self.rows(batch)
        present = self.present(batch, usable)
        view = self.view(rows | self.following(batch))
        behaviour = batch["action_log_prob"]
        # Random actions have version -1 and no log-probability.
        log_ratio = torch.where(versions >= 0, view.log_prob - behaviour, 0)
        self.ratios = Ratios(log_ratio[usable], versions[usable])
        reward, terminated = batch["next", "reward"], batch["next", "terminated"]
        if config.normalise_rewards:
            self.reward_normaliser.update(self.discounted_rewards.follow(batch)[mask])
            reward = self.reward_normaliser(reward)
        steps = Steps(reward, view.value, view.next_value, terminated, view.continues, mask)
        returns = self.returns(batch, steps, log_ratio)
        rows |= {"behaviour": behaviour, "proximal": view.log_prob, "old_value": view.value}
        rows |= {"advantage": returns.advantages, "target": returns.targets}
        rows |= {"trajectory": batch["collector", "traj_ids"], "age": age(versions, version)}
        if config.on_stale == "mask":
            rows["counts"] = usable
        if not config.shuffle:
            rows["time"] = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        metrics = {
            "dropped": int((mask & ~usable).sum()),
            "explained_variance": explained_variance(returns.targets, view.value, mask),
        }
        return self.layout.arrange(rows, present, view.states), metrics

    def returns(self, batch: TensorDictBase, steps: Steps, log_ratio: Tensor) -> Returns:
        """What every frame is worth."""
        config = self.config
        if not config.vtrace:
            return gae(steps, gamma=config.gamma, lam=config.gae_lambda)
        caps = {"rho": config.vtrace_rho, "c": config.vtrace_c}
        return vtrace(steps, log_ratio, gamma=config.gamma, lam=config.gae_lambda, **caps)

    def minibatches(self, frames: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The frames, sequences or trajectories in parts of nearly equal size.

        In random order; without `shuffle` by time, and rows in their order.
        """
        count, size = len(frames["action"]), self.config.minibatch_size
        if self.config.shuffle:
            order = torch.randperm(count, generator=self.generator).to(self.device)
        else:
            order = frames["time"].reshape(count, -1)[:, 0].argsort(stable=True)
        for places in self.layout.split(frames, order, size):
            yield self.layout.take(frames, places)

    def loss(self, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one minibatch, and what to report of it."""
        config, head = self.config, self.policy.head
        features = self.policy.features(part)
        parameters = head(features)
        part = part | {
            "log_prob": head.log_prob(parameters, part["action"]),
            "entropy": head.entropy(parameters),
            "value": self.critic(part["inputs"], features),
        }
        if self.averaged is not None:
            part["averaged"] = self.averaged_log_prob(part)
        if self.objective.needs("needs_scores"):
            part["scores"] = self.scores(features.detach(), part["action"])
        part = self.layout.frames(part)
        advantages = part["advantage"]
        if config.normalise_advantages and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        counts = part.get("counts")
        frames = Frames(
            log_prob=part["log_prob"],
            behaviour=part["behaviour"],
            proximal=part.get("averaged", part["proximal"]),
            advantages=advantages,
            trajectory=part["trajectory"],
            age=part["age"],
            scores=part.get("scores"),
            counts=counts,
        )
        policy_loss, measured = self.objective(frames, config)
        value_loss = value_loss_of(config, part["value"], part["old_value"], part["target"], counts)
        entropy = mean(part["entropy"], counts)
        loss = policy_loss - config.entropy_weight * entropy + config.value_weight * value_loss
        losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        measured |= {name: value.detach() for name, value in losses.items()}
        if counts is not None:
            measured["counted_share"] = counts.float().mean()
        if config.target_kl is not None:
            measured["update_kl"] = kl_estimate(part["log_prob"].detach() - part["proximal"])
        return loss, measured

    def scores(self, features: Tensor, action: Tensor) -> Tensor:
        """For objectives with `needs_scores`, of each frame: the gradient of log_prob, as a row.

        By the weights of the policy's last layer.
        """
        head = self.policy.head

        def total(outputs: Tensor) -> Tensor:
            log_prob: Tensor = head.log_prob(head.distribution(outputs), action)
            return log_prob.sum()

        slopes = torch.func.grad(total)(head.layer(features).detach()).detach()
        by_weights = slopes.unsqueeze(-1) * features.unsqueeze(-2)
        return torch.cat([by_weights.flatten(-2), slopes], dim=-1)

    @torch.no_grad()
    def averaged_log_prob(self, part: dict[str, Tensor]) -> Tensor:
        """For objectives with `proximal_decay`: log_prob by the moving average of the weights."""
        assert self.averaged is not None
        policy = self.averaged.module
        return policy.head.log_prob(policy.head(policy.features(part)), part["action"])


def check_objective(objective: Objective, config: PPOConfig, setup: Setup) -> None:
    """Refuse an objective that the action space does not allow."""
    if objective.needs("needs_probabilities") and isinstance(setup.action_space, Box):
        raise ConfigError(
            f"algo.objective={show(config.objective)} bounds probabilities of actions, and those "
            f"of {setup.action_space} have densities; expected discrete actions, or "
            f"algo.objective={objective.options.instead}"
        )


def value_loss_of(
    config: PPOConfig, value: Tensor, old: Tensor, target: Tensor, counts: Tensor | None = None
) -> Tensor:
    """Half the squared error of the values; the worse of clipped and unclipped, if clipped."""
    error = (value - target).square()
    if config.clip_value:
        clipped = old + (value - old).clamp(-config.clip, config.clip)
        error = torch.max(error, (clipped - target).square())
    return 0.5 * mean(error, counts)
