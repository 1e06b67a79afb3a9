"""The networks of PPO and IMPALA: a policy that acts, and a critic that stays with the learner."""

from __future__ import annotations

from typing import NamedTuple

import torch
from gymnasium.spaces import Space
from tensordict import TensorDictBase
from tensordict.nn import interaction_type
from torch import Tensor, nn

from collectors import next_observations
from harness.algorithms.interface import Setup
from harness.algorithms.returns import continues
from harness.models.encoders import RecurrentEncoder, encoder, flat, orthogonal
from harness.models.heads import action_head
from harness.models.normalise import Normaliser
from harness.options.algorithms import IMPALAConfig, PPOConfig
from harness.options.models import ModelConfig


class Actor(nn.Module):
    """The module that is sent to workers: computes an action and its log-probability.

    It includes the statistics that scale observations, which are sent with the weights.
    """

    def __init__(
        self,
        config: PPOConfig | IMPALAConfig,
        model: ModelConfig,
        observation_space: Space,
        action_space: Space,
    ):
        super().__init__()
        self.encoder = encoder(model, observation_space)
        self.head = action_head(action_space, self.encoder.num_features)
        self.is_image = self.encoder.reads_images
        self.observation_dims = len(observation_space.shape or ())
        self.normaliser: Normaliser | None = None
        if config.normalise_observations:
            if self.is_image:
                raise ValueError(
                    f"algo.normalise_observations=true model={model.name}: this model scales "
                    "images itself; expected false"
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
        inputs = self.prepare(observation)
        carried: tuple[Tensor, ...] = ()
        if isinstance(self.encoder, RecurrentEncoder):
            if state is None:  # a collector asks for the initial state
                state = self.encoder.initial_state(len(inputs))
            features, after = self.encoder(inputs, state)
            carried = (after,)
        else:
            features = self.encoder(inputs)
        parameters = self.head(features)
        action = self.head.act(parameters, interaction_type())
        return (action, self.head.log_prob(parameters, action), *carried)

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


class Critic(nn.Module):
    """The value of an observation, from its own encoder or from the policy's features."""

    def __init__(self, model: ModelConfig, observation_space: Space, num_features: int):
        super().__init__()
        self.encoder = encoder(model, observation_space) if model.own_critic else None
        self.value = orthogonal(nn.Linear(num_features, 1), gain=1.0)

    def forward(self, inputs: Tensor, features: Tensor) -> Tensor:
        if self.encoder is not None:
            features = self.encoder(inputs)
        return self.value(features).squeeze(-1)


def actor_critic(config: PPOConfig | IMPALAConfig, setup: Setup) -> tuple[Actor, Critic]:
    """Both, for the spaces and the model of `setup`."""
    actor = Actor(config, setup.model, setup.observation_space, setup.action_space)
    return actor, Critic(setup.model, setup.observation_space, actor.encoder.num_features)


class View(NamedTuple):
    """What the networks presently make of rows of frames [E, T]."""

    log_prob: Tensor  # of the action
    parameters: Tensor  # of the distribution of actions
    value: Tensor
    next_value: Tensor  # of the observation that truly followed; without gradient
    continues: Tensor  # where the next frame of the row carries on
    states: Tensor | None  # of a recurrent policy after each frame; without gradient


def view(
    policy: Actor,
    critic: Critic,
    batch: TensorDictBase,
    rows: dict[str, Tensor],
    length: int | None = None,
) -> View:
    """Evaluate every frame, and what followed it where the row does not go on.

    Elsewhere, what followed is the row's next frame. `length`: the frames that gradients of a
    recurrent policy go back through; None: those of the row.
    """
    network, mask = policy.encoder, batch["collector", "mask"]
    goes_on = continues(batch["next", "done"], batch["collector", "traj_ids"], mask)
    cut = mask & ~goes_on & ~batch["next", "terminated"]
    next_inputs, states = policy.prepare(next_observations(batch, cut)), None
    if isinstance(network, RecurrentEncoder):
        features, states = _unroll(network, rows, length or mask.shape[1])
        with torch.no_grad():
            next_features, _ = network(next_inputs, states[cut])
    else:
        features = network(rows["inputs"].flatten(0, 1)).unflatten(0, mask.shape)
        with torch.no_grad():
            next_features = network(next_inputs) if critic.encoder is None else next_inputs
    parameters, value = policy.head(features), critic(rows["inputs"], features)
    with torch.no_grad():
        next_value = value.roll(-1, 1)
        next_value[cut] = critic(next_inputs, next_features)
    log_prob = policy.head.log_prob(parameters, rows["action"])
    return View(log_prob, parameters, value, next_value, goes_on, states)


def _unroll(
    network: RecurrentEncoder, rows: dict[str, Tensor], length: int
) -> tuple[Tensor, Tensor]:
    """Features of rows, from the state that each begins with, and the state after each frame."""
    state, parts = rows["state"][:, 0], []
    pieces = (rows[key].split(length, dim=1) for key in ("inputs", "starts"))
    for inputs, starts in zip(*pieces, strict=True):
        features, after = network.unroll(inputs, state, starts)
        state = after[:, -1].detach()
        parts.append((features, after.detach()))
    all_features, states = zip(*parts, strict=True)
    return torch.cat(all_features, dim=1), torch.cat(states, dim=1)
