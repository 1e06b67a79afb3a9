"""The networks of PPO and IMPALA: a policy that acts, and a critic that stays with the learner."""

from __future__ import annotations

from gymnasium.spaces import Space
from tensordict.nn import interaction_type
from torch import Tensor, nn

from harness.algorithms.interface import Setup
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
