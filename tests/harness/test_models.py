from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from harness.models.encoders import (
    CNNConfig,
    LSTMConfig,
    LSTMEncoder,
    MemoryConfig,
    MinAtarCNNConfig,
    MLPConfig,
    encoder,
    orthogonal,
)
from harness.options.base import build
from harness.registry import models

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


IMAGES = {
    "bytes": image(3, 40, 48),
    "bytes, last": image(40, 48, 3),
    "bits": Box(0, 1, (4, 40, 40), np.bool_),
    "bits, last": Box(0, 1, (40, 40, 4), np.bool_),
    "floats": Box(0, 1, (3, 40, 48), np.float32),
    "float64, last": Box(0, 1, (40, 48, 3), np.float64),
    "greys": image(40, 48),
}


def sampled(space: Box, count: int = 6) -> torch.Tensor:
    space.seed(0)
    return torch.as_tensor(np.stack([space.sample() for _ in range(count)]))


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", ["cnn", "impala_cnn", "minatar_cnn"])
def test_every_model_for_images_reads_every_kind_of_them(name, kind):
    network = encoder(models.get(name).options(hidden_sizes=[8]), IMAGES[kind])
    features = network(sampled(IMAGES[kind]))
    assert features.shape == (6, network.num_features)
    assert features.dtype == torch.float32
    assert features.std(0).max() > 0
    features.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", ["cnn_lstm", "impala_cnn_lstm", "minatar_cnn_lstm"])
def test_every_model_for_images_combines_with_an_lstm(name, kind):
    config = models.get(name).options(hidden_sizes=[8], lstm_size=5)
    network = encoder(config, IMAGES[kind])
    assert isinstance(network, LSTMEncoder)
    assert network.reads_images
    assert config.recurrent
    assert not config.own_critic
    steps = sampled(IMAGES[kind]).unflatten(0, (2, 3))
    starts = torch.tensor([[False, True, False], [False, False, False]])
    features, states = network.unroll(steps, network.initial_state(2), starts)
    state = network.initial_state(2)
    for t in range(3):
        state = state.masked_fill(starts[:, t, None], 0)
        expected, state = network(steps[:, t], state)
        torch.testing.assert_close(features[:, t], expected)
        torch.testing.assert_close(states[:, t], state)


def test_a_model_with_an_lstm_has_the_defaults_of_the_one_without():
    for name in ("cnn", "impala_cnn", "minatar_cnn"):
        without = dataclasses.asdict(models.get(name).options())
        combined = dataclasses.asdict(models.get(f"{name}_lstm").options())
        assert combined.items() >= {**without, "name": f"{name}_lstm"}.items()
        assert combined.keys() - without.keys() == {"lstm_size", "sequence_length"}


def test_only_bytes_are_scaled():
    for space, scale in ((image(3, 40, 40), 255), (Box(0, 1, (3, 40, 40), np.float32), 1)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = encoder(MinAtarCNNConfig(hidden_sizes=[]), space)
        ones = torch.full((1, *space.shape), scale, dtype=torch.as_tensor(space.low).dtype)
        expected = network.convolutions(torch.ones(1, *space.shape))
        torch.testing.assert_close(network(ones), expected)


@pytest.mark.parametrize(
    ("shape", "channels", "planes"),
    [
        ((10, 10, 4), "auto", 4),
        ((10, 10, 10), "auto", 10),  # MinAtar's Seaquest
        ((7, 7, 20), "auto", 20),
        ((20, 7, 7), "auto", 20),
        ((4, 10, 12), "auto", 4),
        ((7, 7, 20), "first", 7),
        ((4, 10, 12), "last", 12),
    ],
)
def test_the_side_that_differs_has_the_channels_unless_it_is_said(shape, channels, planes):
    network = encoder(MinAtarCNNConfig(channels=channels), Box(0, 1, shape, np.bool_))
    assert network.convolutions[0].in_channels == planes


def test_a_users_own_encoder_is_followed_by_an_lstm_if_its_options_say_so():
    @dataclasses.dataclass
    class Remembering(MLPConfig, MemoryConfig):
        own_critic = False
        name: str = "mlp"

    network = encoder(Remembering(hidden_sizes=[4], lstm_size=3), VECTOR)
    assert isinstance(network, LSTMEncoder)
    assert network.num_features == 3


@pytest.mark.parametrize(
    ("name", "space", "hint"),
    [
        ("mlp", Discrete(3), "flatten_observation"),
        ("mlp", Dict({"a": VECTOR}), "flatten_observation"),
        ("mlp", image(84, 84, 3), "use model=cnn"),
        ("lstm", image(84, 84, 3), "use model=cnn"),
        ("cnn", VECTOR, "use model=mlp"),
        ("cnn", image(20, 20, 3), "36 by 36 or more.*resize"),
        ("cnn", image(10, 10, 4), "model=minatar_cnn"),
        ("cnn", Box(0, 1, (9, 9), np.float32), "use model=mlp"),
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
        build(LSTMConfig, change, "model")


def test_an_unknown_model_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"model=mpl: .*did you mean mlp"):
        encoder(MLPConfig(name="mpl"), VECTOR)
