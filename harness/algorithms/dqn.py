"""Deep Q-learning, for discrete actions, on samples of a replay buffer.

Each part is an option: double Q-learning (van Hasselt et al., 2016), duelling networks (Wang et
al., 2016), n-step returns, prioritised replay (Schaul et al., 2016), and one annealed epsilon (Mnih
et al., 2015) or another for each worker (Horgan et al., 2018, Ape-X).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from gymnasium.spaces import Discrete, Space
from tensordict import TensorDictBase
from tensordict.nn import interaction_type
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from collectors.data.prioritised_replay import PrioritisedReplayBuffer
from collectors.options.check_types import (
    Count,
    NonNegative,
    NonNegativeInt,
    Positive,
    Range,
    Share,
)
from harness.algorithms.interface import ReplayAlgorithm, ReplayConfig, Setup
from harness.algorithms.optimisers import Adam, follow, seeded
from harness.errors import ConfigError
from harness.models.encoders import encoder, flat, mlp, orthogonal
from harness.models.heads import wants_sample
from harness.options.run import ModelConfig
from harness.registry import algorithms

LEAST_PRIORITY = 1e-6  # so that a frame without an error is drawn again, too


@dataclass
class DQNConfig(ReplayConfig):
    """Deep Q-learning: off-policy, for discrete actions, on samples of a replay buffer."""

    models: ClassVar[str] = "mlp or model=cnn"

    name: str = "dqn"
    learning_rate: Positive = 2.5e-4  # of Adam
    anneal_learning_rate: bool = False  # linearly, to zero at the last frame
    gamma: Share = 0.99  # discount
    batch_size: Count = 32  # replayed frames in one update
    buffer_size: Count = 100_000  # frames that the replay buffer holds
    learning_starts: NonNegativeInt = 5_000  # random frames before the first update
    updates_per_frame: Positive = 0.25  # gradient steps for each collected frame
    max_grad_norm: NonNegative = 10.0  # of all gradients together; 0: no limit
    double: bool = True  # the network chooses the next action, the target network evaluates it
    duelling: bool = False  # separate estimates for state values and action advantages
    n_steps: Count = 1  # rewards that a return sums before it bootstraps
    target_interval: Count = 500  # updates between two updates of the target network
    # how far the target network moves to the network each time; 1: a copy
    target_tau: Annotated[float, Range(0, 1, above=True)] = 1.0
    epsilon_start: Share = 1.0  # probability of a random action after the random frames
    epsilon_end: Share = 0.05  # and after `epsilon_frames` more, which it falls to linearly
    epsilon_frames: Count = 10_000  # see `epsilon_end`
    # constant probabilities instead, as in Ape-X: of worker i among n,
    # epsilon_base ** (1 + epsilon_power * i / (n - 1))
    epsilon_per_worker: bool = False
    epsilon_base: Share = 0.4  # epsilon_per_worker=true: epsilon of the first worker
    epsilon_power: NonNegative = 7.0  # epsilon_per_worker=true: spread over the other workers
    prioritised: bool = False  # draw frames with large errors more often
    priority_exponent: Share = 0.6  # 0: uniformly; 1: in proportion to the error
    # of the importance weights at first; it grows linearly, to 1 at the last frame
    weight_exponent: Share = 0.4

    def check(self, config: Any) -> None:
        super().check(config)
        collector = config.collector
        if self.epsilon_per_worker and collector.simulates and collector.cudagraph_policy:
            raise ConfigError(
                "algo.epsilon_per_worker=true collector.cudagraph_policy=true: all simulated "
                "workers share one graph, which holds one epsilon; expected false for one of them"
            )


class QNetwork(nn.Module):
    """What every action is worth: [N, actions] from observations [N, ...].

    duelling: the value of the state and the advantages of the actions have a hidden layer each. The
    advantages are taken relative to their mean.
    """

    def __init__(self, model: ModelConfig, space: Space, num_actions: int, *, duelling: bool):
        super().__init__()
        if model.recurrent:
            raise ValueError(f"algo=dqn replays single frames, but model={model.name} has memory")
        self.encoder = encoder(model, space)
        self.observation_dims = len(space.shape or ())
        width = self.encoder.num_features

        def output(size: int) -> nn.Module:
            last = orthogonal(nn.Linear(width, size), gain=1.0)
            if not duelling:
                return last
            return nn.Sequential(orthogonal(mlp(width, [width], model.activation)), last)

        self.advantages = output(num_actions)
        self.value = output(1) if duelling else None

    def forward(self, observation: Tensor) -> Tensor:
        if not self.encoder.reads_images:
            observation = flat(observation.float(), self.observation_dims)
        features = self.encoder(observation)
        advantages: Tensor = self.advantages(features)
        if self.value is None:
            return advantages
        return self.value(features) + advantages - advantages.mean(-1, keepdim=True)


class DQNPolicy(nn.Module):
    """The module that is sent to workers: acts best or, with probability epsilon, at random.

    epsilon: a buffer, which is sent with the weights: one number for all workers, or one for each.
    worker_idx: the worker that this policy acts in, which sets it.
    """

    epsilon: Tensor

    def __init__(self, network: QNetwork, actions: Discrete, epsilon: list[float]):
        super().__init__()
        self.in_keys = ["observation"]
        self.out_keys = ["action"]
        self.network = network
        self.num_actions = int(actions.n)
        self.first_action = int(actions.start)
        self.worker_idx = 0
        self.register_buffer("epsilon", torch.tensor(epsilon))

    def forward(self, observation: Tensor) -> Tensor:
        """Act on observations [N, ...], as `tensordict.nn.interaction_type()` says."""
        action = self.network(observation).argmax(-1)
        if wants_sample(interaction_type()):
            explores = torch.rand(action.shape, device=action.device) < self._share_at_random()
            action = torch.where(explores, torch.randint_like(action, self.num_actions), action)
        return action + self.first_action

    def entropy(self, observation: Tensor) -> Tensor:
        """The entropy [N] of the actions, for an evaluation: it only depends on epsilon."""
        others = self._share_at_random() / self.num_actions
        best = 1 - (self.num_actions - 1) * others
        entropy = torch.special.entr(best) + (self.num_actions - 1) * torch.special.entr(others)
        return entropy.expand(len(observation))

    def _share_at_random(self) -> Tensor:
        """The epsilon of the worker that this policy acts in."""
        return self.epsilon[min(self.worker_idx, len(self.epsilon) - 1)]


def epsilons(config: DQNConfig, num_workers: int) -> list[float]:
    """Those that the run begins with: of each worker, or one for all."""
    if not config.epsilon_per_worker:
        return [config.epsilon_start]
    parts = max(1, num_workers - 1)
    powers = [1 + config.epsilon_power * worker / parts for worker in range(num_workers)]
    return [config.epsilon_base**power for power in powers]


@algorithms.register("dqn", options=DQNConfig)
class DQN(ReplayAlgorithm):
    """The learner: holds `policy`, which is sent to workers, and improves it by replayed frames."""

    STATE = ("policy", "target_network", "optimiser", "frames", "updates", "frames_owed")

    def __init__(self, config: DQNConfig, setup: Setup):
        actions = setup.action_space
        if not isinstance(actions, Discrete):
            raise ValueError(f"algo=dqn needs a Discrete action space, but this is {actions}")
        self.config = config
        self.device = setup.device
        self.frames_to_learn = max(1, setup.total_frames - config.learning_starts)
        with seeded(setup.seed):
            network = QNetwork(
                setup.model, setup.observation_space, int(actions.n), duelling=config.duelling
            )
        self.policy = DQNPolicy(network, actions, epsilons(config, setup.num_workers))
        self.policy.to(self.device)
        self.network = network
        self.target_network = copy.deepcopy(network).requires_grad_(False)
        self.optimiser = Adam(network.parameters(), config.learning_rate)
        if config.n_steps > 1 or config.prioritised:
            self.replay = PrioritisedReplayBuffer(
                config.buffer_size,
                num_steps=config.n_steps,
                gamma=config.gamma,
                exponent=config.priority_exponent if config.prioritised else None,
                seed=setup.seed,
            )
        self.frames = 0  # collected since the first update was due
        self.updates = 0

    @property
    def done(self) -> float:
        """The share of the frames to learn from that was already collected."""
        return min(1.0, self.frames / self.frames_to_learn)

    def updates_due(self, num_frames: int) -> int:
        """The number of updates to do after this many new frames."""
        self.frames += num_frames
        if not self.config.epsilon_per_worker:
            start, end = self.config.epsilon_start, self.config.epsilon_end
            done = min(1.0, self.frames / self.config.epsilon_frames)
            self.policy.epsilon.fill_(start + done * (end - start))
        return super().updates_due(num_frames)

    def update(self, samples: TensorDictBase) -> dict[str, float]:
        """Learn once from replayed frames [N]."""
        samples = samples.to(self.device)
        if self.config.anneal_learning_rate:
            self.optimiser.learning_rate = self.config.learning_rate * (1 - self.done)
        metrics = self.step(self.part(samples))
        errors = metrics.pop("errors")
        if self.config.prioritised:
            self.replay.prioritise(samples["replay", "serial"].cpu(), errors.cpu() + LEAST_PRIORITY)
        self.updates += 1
        if self.updates % self.config.target_interval == 0:
            follow(self.target_network, self.network, self.config.target_tau)
        metrics["epsilon"] = self.policy.epsilon.mean()
        return {f"train/{name}": float(value) for name, value in metrics.items()}

    def part(self, samples: TensorDictBase) -> dict[str, Tensor]:
        """What the loss is computed from."""
        part = {
            "observation": samples["observation"],
            "action": samples["action"].long().unsqueeze(-1) - self.policy.first_action,
            "following": samples["next", "observation"],
            "terminated": samples["next", "terminated"],
            "reward": samples["next", "reward"],
        }
        if self.config.prioritised:
            part["weight"] = self._weights(samples["replay", "share"])
        if ("replay", "discount") in samples.keys(True):
            part["discount"] = samples["replay", "discount"]
        return part

    def step(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """A gradient step on the loss of replayed frames; what to report of it."""
        loss, measured = self.loss(part)
        norm = self.optimiser.step(loss, self.config.max_grad_norm)
        return {**measured, "grad_norm": norm}

    def loss(self, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of replayed frames, and what to report of it."""
        values = self.network(part["observation"]).gather(-1, part["action"]).squeeze(-1)
        target = self._target(part)
        losses = huber_loss(values, target, reduction="none")
        loss = (losses * part["weight"] if "weight" in part else losses).mean()
        values = values.detach()
        errors = (values - target).abs()
        return loss, {"loss": loss.detach(), "q": values.mean(), "errors": errors}

    @torch.no_grad()
    def _target(self, part: dict[str, Tensor]) -> Tensor:
        """The rewards, and what the target network makes of what followed."""
        values = self.target_network(part["following"])
        chooser = self.network(part["following"]) if self.config.double else values
        best = values.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
        # A truncated episode would have gone on; a terminated one is worth nothing more.
        best = best.masked_fill(part["terminated"], 0)
        return part["reward"] + part.get("discount", self.config.gamma) * best

    def _weights(self, share: Tensor) -> Tensor:
        """Importance weights, which make up for how much likelier than others a frame is drawn.

        Annealed to a full correction at the end, and scaled so that the largest is one.
        """
        start = self.config.weight_exponent
        weights = share ** -(start + self.done * (1 - start))
        return weights / weights.max()
