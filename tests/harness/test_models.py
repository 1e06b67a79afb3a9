from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from harness.models.encoders import LSTMEncoder, encoder, orthogonal
from harness.options import CNNConfig, LSTMConfig, MLPConfig

KINDS = {"mlp": MLPConfig, "cnn": CNNConfig, "lstm": LSTMConfig}
VECTOR = Box(-1, 1, (3,))


def image(*shape: int) -> Box:
    return Box(0, 255, shape, np.uint8)


def test_the_widths_are_those_of_the_config():
    network = encoder(MLPConfig(hidden_sizes=[7, 5], activation="relu"), VECTOR)
    assert [tuple(p.shape) for p in network.parameters()] == [(7, 3), (7,), (5, 7), (5,)]
    assert network.num_features == 5
    assert network(torch.randn(4, 3)).min() >= 0


def test_without_hidden_layers_features_are_the_observation():
    observation = torch.randn(4, 3)
    assert torch.equal(encoder(MLPConfig(hidden_sizes=[]), VECTOR)(observation), observation)


def test_hidden_layers_start_orthogonal():
    weight = next(encoder(MLPConfig(hidden_sizes=[3]), VECTOR).parameters()).detach()
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(3))


def test_orthogonal_zeroes_biases():
    assert orthogonal(torch.nn.Linear(4, 4)).bias.abs().sum() == 0


def test_images_may_have_their_channels_first_or_last():
    config = CNNConfig(hidden_sizes=[16])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = encoder(config, image(3, 40, 48))
        torch.manual_seed(0)
        last = encoder(config, image(40, 48, 3))
    picture = torch.randint(0, 256, (2, 3, 40, 48), dtype=torch.uint8)
    torch.testing.assert_close(first(picture), last(picture.movedim(1, -1)))


@pytest.mark.parametrize(
    ("name", "space", "hint"),
    [
        ("mlp", Discrete(3), "flatten_observation"),
        ("mlp", Dict({"a": VECTOR}), "flatten_observation"),
        ("mlp", image(84, 84, 3), "use model=cnn"),
        ("lstm", image(84, 84, 3), "use model=cnn"),
        ("cnn", VECTOR, "use model=mlp"),
        ("cnn", image(20, 20, 3), "36 by 36 or more.*resize"),
    ],
)
def test_observations_that_a_model_cannot_read_are_refused_with_what_would_do(name, space, hint):
    with pytest.raises(ValueError, match=hint):
        encoder(KINDS[name](), space)


# -- lstm


def lstm() -> LSTMEncoder:
    network = encoder(LSTMConfig(hidden_sizes=[6], lstm_size=5), VECTOR)
    assert isinstance(network, LSTMEncoder)
    return network


@torch.no_grad()
def test_an_unrolled_memory_is_the_same_as_step_by_step():
    network, observations = lstm(), torch.randn(2, 7, 3)
    starts = torch.zeros(2, 7, dtype=torch.bool)
    starts[0, 3] = starts[1, 0] = True
    first = torch.randn(2, 10)
    features, states = network.unroll(observations, first, starts)
    state = first
    for t in range(7):
        state = state.masked_fill(starts[:, t, None], 0)
        expected, state = network(observations[:, t], state)
        torch.testing.assert_close(features[:, t], expected)
        torch.testing.assert_close(states[:, t], state)


@torch.no_grad()
def test_an_episode_remembers_nothing_of_the_one_before():
    network, observations = lstm(), torch.randn(1, 4, 3)
    starts = torch.tensor([[False, False, True, False]])
    features, _ = network.unroll(observations, torch.randn(1, 10), starts)
    fresh, _ = network.unroll(observations[:, 2:], network.initial_state(1), starts[:, :2])
    torch.testing.assert_close(features[:, 2:], fresh)


# -- config


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"activation": "rleu"}, "model.activation=rleu: .*did you mean relu"),
        ({"hidden_sizes": [64, 0]}, "model.hidden_sizes=.64, 0.: expected .*1 or more"),
        ({"lstm_size": 0}, "model.lstm_size=0: "),
        ({"sequence_length": 0}, "model.sequence_length=0: "),
    ],
)
def test_a_config_that_describes_no_network_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        LSTMConfig(**change).validate()


def test_an_unknown_model_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"model=mpl: .*did you mean mlp"):
        encoder(MLPConfig(name="mpl"), VECTOR)
