from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Text
from tensordict.nn import InteractionType
from torch.distributions import Categorical, Normal

from harness.models.heads import action_head

RANDOM, MODE = InteractionType.RANDOM, InteractionType.MODE


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def with_parameters(head, features):
    """The head with weights large enough for its choices to differ."""
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head(features)


def test_a_discrete_head_agrees_with_the_categorical_distribution():
    features = torch.randn(50, 4)
    head = action_head(Discrete(3), 4)
    parameters = with_parameters(head, features)
    expected = Categorical(logits=head.logits(features))
    action = head.act(parameters, RANDOM)
    assert action.dtype == torch.int64
    assert action.shape == (50,)
    torch.testing.assert_close(head.log_prob(parameters, action), expected.log_prob(action))
    torch.testing.assert_close(head.entropy(parameters), expected.entropy())
    assert torch.equal(head.act(parameters, MODE), expected.mode)


def test_discrete_samples_are_as_frequent_as_they_are_probable():
    head = action_head(Discrete(3), 1)
    log_probs = torch.tensor([0.2, 0.5, 0.3]).log().expand(20_000, 3)
    counts = head.act(log_probs, RANDOM).bincount() / 20_000
    torch.testing.assert_close(counts, torch.tensor([0.2, 0.5, 0.3]), atol=0.02, rtol=0)


def test_discrete_actions_count_from_the_start_of_the_space():
    space = Discrete(3, start=5)
    head = action_head(space, 4)
    parameters = with_parameters(head, torch.randn(50, 4))
    action = head.act(parameters, RANDOM)
    assert set(action.tolist()) <= {5, 6, 7}
    expected = Categorical(logits=parameters).log_prob(action - 5)
    torch.testing.assert_close(head.log_prob(parameters, action), expected)


def test_choices_may_be_numbers_of_any_type():
    for space in (Discrete(3, dtype=np.uint8), MultiDiscrete([2, 3], dtype=np.int8)):
        head = action_head(space, 4)
        parameters = with_parameters(head, torch.randn(50, 4))
        action = head.act(parameters, RANDOM)
        small = action.to(torch.uint8)
        assert torch.equal(head.log_prob(parameters, small), head.log_prob(parameters, action))


def test_several_choices_side_by_side_are_independent():
    space = MultiDiscrete([2, 3], start=[0, 10])
    head = action_head(space, 4)
    features = torch.randn(50, 4)
    parameters = with_parameters(head, features)
    first, second = (Categorical(logits=x) for x in head.logits(features).split([2, 3], -1))
    action = head.act(parameters, RANDOM)
    assert all(space.contains(a) for a in action.numpy())
    expected = first.log_prob(action[:, 0]) + second.log_prob(action[:, 1] - 10)
    torch.testing.assert_close(head.log_prob(parameters, action), expected)
    torch.testing.assert_close(head.entropy(parameters), first.entropy() + second.entropy())


def test_a_box_head_agrees_with_the_normal_distribution():
    features = torch.randn(50, 4)
    head = action_head(Box(-1, 1, (2, 3)), 4)
    parameters = with_parameters(head, features)
    expected = Normal(parameters, head.log_std.exp())
    action = head.act(parameters, RANDOM)
    assert action.shape == (50, 2, 3)
    log_prob = expected.log_prob(action.flatten(1)).sum(-1)
    torch.testing.assert_close(head.log_prob(parameters, action), log_prob)
    torch.testing.assert_close(head.entropy(parameters), expected.entropy().sum(-1))
    assert torch.equal(head.act(parameters, MODE).flatten(1), parameters)


@pytest.mark.parametrize("mode", ["MODE", "MEAN", "DETERMINISTIC"])
@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete([2, 2]), Box(-1, 1, (2,))])
def test_only_random_actions_vary(space, mode):
    head = action_head(space, 4)
    parameters = with_parameters(head, torch.randn(50, 4))
    kind = InteractionType[mode]
    assert torch.equal(head.act(parameters, kind), head.act(parameters, kind))
    assert not torch.equal(head.act(parameters, RANDOM), head.act(parameters, RANDOM))


def test_new_heads_prefer_nothing():
    parameters = action_head(Discrete(4), 8)(torch.randn(20, 8))
    torch.testing.assert_close(parameters.exp(), torch.full((20, 4), 0.25), atol=0.02, rtol=0)


def test_a_space_without_a_head_is_refused_by_name():
    with pytest.raises(ValueError, match=r"action space is Text.*Discrete, MultiDiscrete and Box"):
        action_head(Text(3), 4)
