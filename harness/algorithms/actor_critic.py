"""What PPO and IMPALA share: a policy that acts, a critic that stays, and how both see a batch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import interaction_type
from torch import Tensor, nn

from collectors import next_observations
from harness.algorithms.interface import Algorithm, Setup
from harness.algorithms.optimisers import Optimiser, seeded
from harness.algorithms.returns import continues
from harness.models.encoders import RecurrentEncoder, encoder, flat, orthogonal
from harness.models.heads import action_head
from harness.models.normalise import Normaliser
from lockstep_check.ages import is_within

Stale = Literal["drop", "mask", "wait"]  # `wait` leaves nothing to drop
LOSSES = ("policy_loss", "value_loss", "entropy")


def as_means_of_counted(metrics: dict[str, float]) -> dict[str, float]:
    """Losses as means over the frames that have a weight, for the record.

    With `on_stale=mask` a loss is a mean over all frames, those without a weight as zeros, so that
    each frame keeps its part in the gradient. "counted_share" is the share with a weight.
    """
    share = metrics.pop("counted_share", 1.0)
    return {name: x / share if name in LOSSES else x for name, x in metrics.items()}


class ActorCriticOptions(Protocol):
    """What is read here of the options of PPO and of IMPALA."""

    learning_rate: float
    anneal_learning_rate: bool
    max_grad_norm: float
    normalise_observations: bool
    max_lag: int | None
    on_stale: Stale


class Actor(nn.Module):
    """The module that is sent to workers: computes an action and its log-probability.

    It includes the statistics that scale observations, which are sent with the weights.
    """

    def __init__(self, config: ActorCriticOptions, setup: Setup):
        super().__init__()
        observation_space = setup.observation_space
        self.encoder = encoder(setup.model, observation_space)
        self.head = action_head(setup.action_space, self.encoder.num_features)
        self.is_image = self.encoder.reads_images
        self.observation_dims = len(observation_space.shape or ())
        self.normaliser: Normaliser | None = None
        if config.normalise_observations:
            if self.is_image:
                raise ValueError(
                    f"algo.normalise_observations=true model={setup.model.name}: this model takes "
                    "observations as they are; expected false"
                )
            self.normaliser = Normaliser(tuple(observation_space.shape or ()))
        self.in_keys = ["observation"]
        self.out_keys: list[str | tuple[str, ...]] = ["action", "action_log_prob"]
        self.is_recurrent = isinstance(self.encoder, RecurrentEncoder)
        if self.is_recurrent:
            self.in_keys.append("state")
            self.out_keys.append(("next", "state"))

    def forward(self, observation: Tensor, state: Tensor | None = None) -> tuple[Tensor, ...]:
        """Act on observations [N, ...], as `tensordict.nn.interaction_type()` says."""
        parameters, *carried = self._distribution(observation, state)
        action = self.head.act(parameters, interaction_type())
        return (action, self.head.log_prob(parameters, action), *carried)

    def entropy(self, observation: Tensor, state: Tensor | None = None) -> Tensor:
        """The entropy [N] of the actions' distributions, for an evaluation."""
        return self.head.entropy(self._distribution(observation, state)[0])

    def _distribution(self, observation: Tensor, state: Tensor | None) -> tuple[Tensor, ...]:
        """The parameters of the distribution of actions; of a recurrent policy the next state."""
        inputs = self.prepare(observation)
        if not isinstance(self.encoder, RecurrentEncoder):
            return (self.head(self.encoder(inputs)),)
        if state is None:  # a collector asks for the initial state
            state = self.encoder.initial_state(len(inputs))
        features, after = self.encoder(inputs, state)
        return self.head(features), after

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        """The initial state of an episode, by in_key."""
        if isinstance(self.encoder, RecurrentEncoder):
            return {"state": self.encoder.initial_state(num_envs)}
        return {}

    def prepare(self, observation: Tensor) -> Tensor:
        """What the encoder is given: a normalised vector, or an image as it is."""
        if self.is_image:
            return observation
        value = observation.float()
        if self.normaliser is not None:
            value = self.normaliser(value)
        return flat(value, self.observation_dims)

    def features(self, part: dict[str, Tensor]) -> Tensor:
        """What the head is given for each frame of a minibatch of frames or of sequences."""
        if isinstance(self.encoder, RecurrentEncoder):
            features, _ = self.encoder.unroll(part["inputs"], part["state"], part["starts"])
            return features
        return self.encoder(part["inputs"])


class Critic(nn.Module):
    """The value of an observation, from its own encoder or from the policy's features."""

    def __init__(self, setup: Setup, num_features: int):
        super().__init__()
        has_encoder = setup.model.own_critic
        self.encoder = encoder(setup.model, setup.observation_space) if has_encoder else None
        self.value = orthogonal(nn.Linear(num_features, 1), gain=1.0)

    def forward(self, inputs: Tensor, features: Tensor) -> Tensor:
        if self.encoder is not None:
            features = self.encoder(inputs)
        return self.value(features).squeeze(-1)


class View(NamedTuple):
    """What the networks presently make of rows of frames [E, T]."""

    log_prob: Tensor  # of the action
    parameters: Tensor  # of the distribution of actions
    value: Tensor
    next_value: Tensor  # of the observation that truly followed; without gradient
    continues: Tensor  # where the next frame of the row carries on
    states: Tensor | None  # of a recurrent policy after each frame; without gradient


class ActorCritic(Algorithm):
    """The common half of PPO and IMPALA. An annealed learning rate is zero after `total_frames`."""

    STATE: ClassVar[tuple[str, ...]] = ("policy", "critic", "optimiser", "statistics", "frames")
    optimiser: Optimiser

    def __init__(self, config: ActorCriticOptions, setup: Setup):
        self.config = config
        self.device = setup.device
        self.total_frames = setup.total_frames
        self.sequence_length = getattr(setup.model, "sequence_length", 1)  # of recurrent models
        with seeded(setup.seed):
            self.policy = Actor(config, setup)
            self.critic = Critic(setup, self.policy.encoder.num_features)
        self.policy.to(self.device)
        self.critic.to(self.device)
        self.parameters = [*self.policy.parameters(), *self.critic.parameters()]
        self.statistics: Any = self.policy.normaliser
        self.frames = 0  # consumed so far

    def anneal(self, num_frames: int) -> float:
        """Set the learning rate of an update with so many frames."""
        left = 1.0 - self.frames / self.total_frames if self.config.anneal_learning_rate else 1.0
        self.frames += num_frames
        self.optimiser.learning_rate = self.config.learning_rate * max(0.0, left)
        return self.optimiser.learning_rate

    def usable(self, batch: TensorDictBase, version: int) -> Tensor:
        """The frames to learn from: not too old, and no random actions (without a probability)."""
        versions, max_lag = batch["policy_version"], self.config.max_lag
        usable = batch["collector", "mask"] & (versions >= 0)
        return usable if max_lag is None else usable & is_within(versions, version, max_lag)

    def present(self, batch: TensorDictBase, usable: Tensor) -> Tensor:
        """The frames that a loss is the mean of: with `mask`, those that are too old as well."""
        if self.config.on_stale != "mask" or not usable.any():
            return usable
        return batch["collector", "mask"] & (batch["policy_version"] >= 0)

    def rows(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """What the networks are given and what was done, in rows [E, T]; "state": of the first."""
        mask, traj_ids = batch["collector", "mask"], batch["collector", "traj_ids"]
        inputs, action = self.policy.prepare(batch["observation"]), batch["action"]
        if not mask.all() and mask.any():  # padding may hold anything: make it something possible
            shape = (*mask.shape, *[1] * (inputs.dim() - 2))
            inputs = inputs.masked_fill(~mask.view(shape), 0)
            action = action.clone()
            action[~mask] = action[mask][0]
        rows = {"inputs": inputs, "action": action}
        if self.policy.is_recurrent:
            starts = batch["is_init"].clone()
            starts[:, 1:] |= traj_ids[:, 1:] != traj_ids[:, :-1]
            starts |= ~batch["state"].any(-1)  # new weights may have started the state anew
            rows |= {"state": batch["state"][:, 0].clone(), "starts": starts}
        return rows

    def following(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Where the rows of a batch go on, and what followed where they are cut."""
        mask = batch["collector", "mask"]
        goes_on = continues(batch["next", "done"], batch["collector", "traj_ids"], mask)
        cut = mask & ~goes_on & ~batch["next", "terminated"]
        next_inputs = self.policy.prepare(next_observations(batch, cut))
        return {"continues": goes_on, "cut": cut, "next_inputs": next_inputs}

    def view(self, part: dict[str, Tensor], length: int | None = None) -> View:
        """Evaluate every frame of rows [E, T], and what followed it.

        What followed is the row's next frame; where the row is cut, it is "next_inputs", or has
        its value in "ends". length: the frames that gradients of a recurrent policy go back
        through; None: those of the row.
        """
        policy, network, states = self.policy, self.policy.encoder, None
        if isinstance(network, RecurrentEncoder):
            features, states = _unroll(network, part, length or part["cut"].shape[1])
        else:
            features = network(part["inputs"].flatten(0, 1)).unflatten(0, part["cut"].shape)
        parameters, value = policy.head(features), self.critic(part["inputs"], features)
        ends = part["ends"] if "ends" in part else self.ends(part, states)
        next_value = torch.where(part["cut"], ends, value.detach().roll(-1, 1))
        log_prob = policy.head.log_prob(parameters, part["action"])
        return View(log_prob, parameters, value, next_value, part["continues"], states)

    @torch.no_grad()
    def ends(self, part: dict[str, Tensor], states: Tensor | None = None) -> Tensor:
        """The values of what followed where rows are cut, and zero elsewhere.

        states: of a recurrent policy, after each frame.
        """
        features = next_inputs = part["next_inputs"]
        if isinstance(self.policy.encoder, RecurrentEncoder):
            assert states is not None
            features, _ = self.policy.encoder(next_inputs, states[part["cut"]])
        elif self.critic.encoder is None:
            features = self.policy.encoder(next_inputs)
        value = self.critic(next_inputs, features)
        return value.new_zeros(part["cut"].shape).masked_scatter(part["cut"], value)

    def step(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """A gradient step on the loss of a part; what to report of it."""
        loss, measured = self.loss(part)
        scale = float(measured.get("step_scale", 1.0))  # of the learning rate
        norm = self.optimiser.step(loss, self.config.max_grad_norm, scale)
        return {**measured, "grad_norm": norm}

    def loss(self, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a part, and what to report of it."""
        raise NotImplementedError


def _unroll(
    network: RecurrentEncoder, rows: dict[str, Tensor], length: int
) -> tuple[Tensor, Tensor]:
    """Features of rows, from the state that each begins with, and the state after each frame."""
    state, parts = rows["state"], []
    pieces = (rows[key].split(length, dim=1) for key in ("inputs", "starts"))
    for inputs, starts in zip(*pieces, strict=True):
        features, after = network.unroll(inputs, state, starts)
        state = after[:, -1].detach()
        parts.append((features, after.detach()))
    if len(parts) == 1:  # without a copy: a key-value cache is large
        return parts[0]
    all_features, states = zip(*parts, strict=True)
    return torch.cat(all_features, dim=1), torch.cat(states, dim=1)
