"""Proximal policy optimisation, for fresh data and for data that lags behind the learner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from harness.algorithms.actor_critic import Actor, actor_critic, view
from harness.algorithms.batches import network_rows, sequences
from harness.algorithms.interface import Ratios, Setup
from harness.algorithms.objectives import Frames, kl_estimate, objective
from harness.algorithms.returns import Steps, explained_variance, gae, vtrace
from harness.algorithms.state import Adam, Averaged, seeded, weights
from harness.means import Means
from harness.models.encoders import RecurrentEncoder
from harness.models.normalise import DiscountedReturns, Normaliser
from harness.options.algorithms import PPOConfig


class PPO:
    """The learner: holds `policy`, which is sent to workers, and improves it batch by batch.

    An annealed learning rate is zero after `setup.total_frames`.
    """

    PER_FRAME = ("behaviour", "proximal", "averaged", "value", "advantage", "target")

    def __init__(self, config: PPOConfig, setup: Setup):
        if config.compile and setup.model.recurrent:
            # torch 2.13 gives a wrong gradient for the input weights of the cell, silently.
            raise ValueError(
                f"algo.compile=true model={setup.model.name}: the compiled gradient of an LSTM is "
                "wrong; expected false"
            )
        self.config = config
        self.objective = objective(config)
        self.sequence_length = getattr(setup.model, "sequence_length", 1)  # of recurrent models
        self.total_frames = setup.total_frames
        self.device = setup.device
        with seeded(setup.seed):
            self.policy, self.critic = actor_critic(config, setup)
        self.policy.to(self.device)
        self.critic.to(self.device)
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        self.optimiser = Adam(parameters, config.learning_rate, eps=1e-5)
        decay = self.objective.proximal_decay
        self.averaged = None if decay is None else Averaged(self.policy, decay)
        self.generator = torch.Generator().manual_seed(setup.seed)
        self.reward_normaliser = Normaliser(centre=False).to(self.device)
        self.discounted_rewards = DiscountedReturns(config.gamma)
        self.frames = 0  # consumed so far
        self.ratios: Ratios | None = None  # of the last update, at its start
        # Compiled for minibatches of one size first, and for all sizes once there is another.
        self._compiled_loss = torch.compile(self._loss) if config.compile else None

    # -- one update

    def update(self, batch: TensorDictBase, version: int) -> dict[str, float]:
        """Learn from a batch [E, T] while the newest published weights are of `version`."""
        config = self.config
        batch = batch.to(self.device)
        frames, metrics = self.assess(batch, version)
        learning_rate = self._anneal(int(batch["collector", "mask"].sum()))
        loss_of = self._compiled_loss or self._loss
        sums = Means()
        epochs = gradient_steps = 0
        for _ in range(config.epochs if len(frames["action"]) else 0):
            epochs += 1
            kl = Means()
            for part in self._minibatches(frames):
                loss, measured = loss_of(part)
                norm = self.optimiser.step(loss, config.max_grad_norm)
                if self.averaged is not None:
                    self.averaged.follow(self.policy)
                gradient_steps += 1
                sums.add({**measured, "grad_norm": norm})
                if config.target_kl is not None:
                    kl.add({"kl": measured["update_kl"]})
            if config.target_kl is not None and kl.read()["kl"] > config.target_kl:
                break
        if config.normalise_observations:
            # For the next version, not for this one: the update saw observations scaled as the
            # workers of the present version see them.
            self.observe(batch["observation"][batch["collector", "mask"]])
        metrics |= sums.read()
        metrics |= {"learning_rate": learning_rate, "epochs": epochs}
        metrics |= {"gradient_steps": gradient_steps}
        return {f"train/{name}": float(value) for name, value in metrics.items()}

    def _loss(self, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one minibatch, and what to report of it."""
        config = self.config
        log_prob, entropy, value = self._evaluate(part)
        if self.averaged is not None:
            part = {**part, "averaged": self._averaged_log_prob(part)}
        if "mask" in part:  # sequences: their frames one after another, without the padding
            mask = part["mask"]
            log_prob, entropy, value = log_prob[mask], entropy[mask], value[mask]
            part = {key: part[key][mask] for key in self.PER_FRAME if key in part}
        advantages = part["advantage"]
        if config.normalise_advantages and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        proximal = part["proximal"] if self.averaged is None else part["averaged"]
        frames = Frames(log_prob, part["behaviour"], proximal, advantages)
        policy_loss, measured = self.objective(frames, config)
        value_loss = value_loss_of(config, value, part["value"], part["target"])
        entropy = entropy.mean()
        loss = policy_loss - config.entropy_weight * entropy + config.value_weight * value_loss
        losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        measured |= {name: value.detach() for name, value in losses.items()}
        if config.target_kl is not None:
            measured["update_kl"] = kl_estimate(log_prob.detach() - part["proximal"])
        return loss, measured

    def _evaluate(self, part: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Of each frame: the log-probability of its action, the entropy there, and the value."""
        features = _features(self.policy, part)
        parameters = self.policy.head(features)
        log_prob = self.policy.head.log_prob(parameters, part["action"])
        entropy = self.policy.head.entropy(parameters)
        return log_prob, entropy, self.critic(part["inputs"], features)

    @torch.no_grad()
    def _averaged_log_prob(self, part: dict[str, Tensor]) -> Tensor:
        """Of each frame: the log-probability of its action by the average of the weights."""
        assert self.averaged is not None
        policy = self.averaged.module
        return policy.head.log_prob(policy.head(_features(policy, part)), part["action"])

    def _minibatches(self, frames: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The frames (or sequences) in random order, in parts of nearly equal size."""
        size = self.config.minibatch_size
        if self.policy.is_recurrent:
            size = max(1, size // self.sequence_length)
        count = len(frames["action"])
        order = torch.randperm(count, generator=self.generator).to(self.device)
        num_parts = max(1, round(count / size))
        shuffled = {key: value[order].tensor_split(num_parts) for key, value in frames.items()}
        for i in range(num_parts):
            yield {key: parts[i] for key, parts in shuffled.items()}

    def _anneal(self, num_frames: int) -> float:
        left = 1.0 - self.frames / self.total_frames if self.config.anneal_learning_rate else 1.0
        self.frames += num_frames
        learning_rate = self.config.learning_rate * max(0.0, left)
        self.optimiser.learning_rate = learning_rate
        return learning_rate

    def observe(self, observations: Tensor) -> None:
        """Let observations [N, ...] move the statistics that observations are scaled by."""
        if self.policy.normaliser is not None:
            self.policy.normaliser.update(observations)

    # -- before it: what every frame was worth

    @torch.no_grad()
    def assess(
        self, batch: TensorDictBase, version: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The frames to learn from, with advantages, targets and the learner's own view of them."""
        config, mask = self.config, batch["collector", "mask"]
        lag = version - batch["policy_version"]
        chosen = batch["policy_version"] >= 0  # by the policy: random actions have no probability
        usable = mask & chosen
        if config.max_lag is not None:
            usable &= lag <= config.max_lag
        rows = network_rows(self.policy, batch)
        seen = view(self.policy, self.critic, batch, rows)
        if seen.states is not None:
            rows["state"][:, 1:] = seen.states[:, :-1]
        log_prob, value = seen.log_prob, seen.value
        behaviour = batch["action_log_prob"]
        self.ratios = Ratios((log_prob - behaviour)[usable], batch["policy_version"][usable])
        terminated = batch["next", "terminated"]
        rewards = self._rewards(batch)
        steps = Steps(rewards, value, seen.next_value, terminated, seen.continues, mask)
        if config.vtrace:
            log_ratio = torch.where(chosen, log_prob - behaviour, 0)
            caps = {"rho": config.vtrace_rho, "c": config.vtrace_c}
            returns = vtrace(steps, log_ratio, gamma=config.gamma, lam=config.gae_lambda, **caps)
        else:
            returns = gae(steps, gamma=config.gamma, lam=config.gae_lambda)
        rows |= {
            "behaviour": behaviour,
            "value": value,
            "advantage": returns.advantages,
            "target": returns.targets,
            "proximal": log_prob,
        }
        metrics = {
            "dropped": int((mask & ~usable).sum()),
            "explained_variance": explained_variance(returns.targets, value, mask),
        }
        if self.policy.is_recurrent:
            return sequences(rows, usable, self.sequence_length), metrics
        del rows["starts"]
        if usable.all():
            return {key: x.flatten(0, 1) for key, x in rows.items()}, metrics
        return {key: x[usable] for key, x in rows.items()}, metrics

    def _rewards(self, batch: TensorDictBase) -> Tensor:
        reward = batch["next", "reward"]
        if not self.config.normalise_rewards:
            return reward
        mask = batch["collector", "mask"]
        self.reward_normaliser.update(self.discounted_rewards.follow(batch)[mask])
        return self.reward_normaliser(reward)

    # -- checkpoints

    def _normalisers(self) -> dict[str, Normaliser]:
        observations = self.policy.normaliser
        observed = {} if observations is None else {"observations": observations}
        return {"rewards": self.reward_normaliser, **observed}

    def state_dict(self) -> dict[str, Any]:
        averaged = {} if self.averaged is None else {"averaged": self.averaged.state_dict()}
        return {
            **averaged,
            "policy": weights(self.policy),
            "critic": weights(self.critic),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "statistics": {name: n.statistics() for name, n in self._normalisers().items()},
            "discounted_rewards": self.discounted_rewards.state_dict(),
            "frames": self.frames,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        for name, normaliser in self._normalisers().items():
            normaliser.load_statistics(state["statistics"][name])
        self.discounted_rewards.load_state_dict(state["discounted_rewards"])
        self.frames = state["frames"]


def _features(policy: Actor, part: dict[str, Tensor]) -> Tensor:
    """What the policy's head is given for each frame of a minibatch."""
    network = policy.encoder
    if isinstance(network, RecurrentEncoder):
        features, _ = network.unroll(part["inputs"], part["state"], part["starts"])
        return features
    return network(part["inputs"])


def value_loss_of(config: PPOConfig, value: Tensor, old: Tensor, target: Tensor) -> Tensor:
    """Half the squared error of the values; the worse of clipped and unclipped, if clipped."""
    error = (value - target).square()
    if config.clip_value:
        held = old + (value - old).clamp(-config.clip, config.clip)
        error = torch.max(error, (held - target).square())
    return 0.5 * error.mean()
