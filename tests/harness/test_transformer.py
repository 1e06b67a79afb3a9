"""The transformer reads texts alike at once, step by step, and from any cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from harness.models.transformer import TransformerConfig, TransformerEncoder

LENGTH, PROMPT = 9, 4
TEXTS = Box(0, 14, (LENGTH,), np.int64)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = TransformerConfig(hidden_sizes=[16, 24], width=8, heads=2)
    encoder = TransformerEncoder(config, TEXTS)
    torch.nn.init.normal_(encoder.position.weight)
    return encoder


def texts(count: int) -> torch.Tensor:
    """All states of texts that are being written, [count, steps, LENGTH]."""
    whole = torch.randint(1, 15, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    steps = [whole.clone() for _ in range(LENGTH - PROMPT)]
    for step, text in enumerate(steps):
        text[:, PROMPT + step :] = 0
    return torch.stack(steps, 1)


def acted(model, frames, state=None):
    """The features of each step, with the cache that the steps before left."""
    state = model.initial_state(len(frames)) if state is None else state
    features = []
    for step in range(frames.shape[1]):
        one, state = model(frames[:, step], state)
        features.append(one)
    return torch.stack(features, 1), state


def test_writing_token_by_token_gives_the_features_of_the_whole_text(model):
    frames = texts(5)
    step_by_step, _ = acted(model, frames)
    starts = torch.zeros(frames.shape[:2], dtype=torch.bool)
    at_once, _ = model.unroll(frames, model.initial_state(5), starts)
    torch.testing.assert_close(step_by_step, at_once)
    longest = model.read(frames[:, -1])
    torch.testing.assert_close(at_once[:, 0], longest[:, PROMPT - 1])


def test_texts_of_other_lengths_and_caches_side_by_side(model):
    frames = texts(3)
    expected, _ = acted(model, frames)
    caches = torch.cat(
        [acted(model, frames[:, :steps])[1][i : i + 1] for i, steps in enumerate((1, 2, 4))]
    )
    mixed = torch.stack([frames[0, 1], frames[1, 4], frames[2, 4]])
    features, after = model(mixed, caches)
    wanted = torch.stack([expected[0, 1], expected[1, 4], expected[2, 4]])
    torch.testing.assert_close(features, wanted)
    assert after[:, 0].tolist() == [PROMPT + 1, PROMPT + 4, PROMPT + 4]
    again, same = model(mixed, after)  # nothing is new
    torch.testing.assert_close(again, wanted)
    assert torch.equal(same, after)


def test_rows_hold_several_episodes_and_may_begin_in_the_middle_of_one(model):
    frames = texts(4)
    row = torch.cat([frames[0, 2:], frames[1], frames[2, :3]])[None]
    starts = torch.zeros(row.shape[:2], dtype=torch.bool)
    starts[0, [3, 8]] = True
    features, states = model.unroll(row, model.initial_state(1), starts)
    expected, _ = acted(model, frames)
    wanted = torch.cat([expected[0, 2:], expected[1], expected[2, :3]])
    torch.testing.assert_close(features[0], wanted)
    assert states.shape == (*row.shape[:2], model.initial_state(1).shape[1])


def test_what_was_cached_is_of_older_weights_and_an_empty_cache_of_newer_ones(model):
    frames = texts(2)
    _, cache = acted(model, frames[:, :2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    kept, _ = model(frames[:, 2], cache)
    emptied, _ = model(frames[:, 2], torch.zeros_like(cache))
    anew, _ = acted(model, frames)
    torch.testing.assert_close(emptied, anew[:, 2])
    assert not torch.allclose(kept, anew[:, 2], atol=1e-3)


def test_padding_is_read_by_nobody(model):
    frames = texts(1)
    padded = torch.cat([frames, torch.zeros_like(frames[:, :2])], 1)
    starts = torch.zeros(padded.shape[:2], dtype=torch.bool)
    features, _ = model.unroll(padded, model.initial_state(1), starts)
    torch.testing.assert_close(features[:, :-2], acted(model, frames)[0])


def test_no_texts_are_no_features(model):
    features, _ = model(torch.zeros(0, LENGTH), model.initial_state(0))
    assert features.shape == (0, 8)


@pytest.mark.parametrize(
    ("config", "space", "complaint"),
    [
        ({}, Box(-1, 1, (3,), np.float32), "reads texts, .*use env=tokens"),
        ({}, Box(0, 9, (3, 3), np.int64), "reads texts"),
        ({"width": 6}, TEXTS, "model.width=6 model.heads=4: the width is a multiple"),
    ],
)
def test_what_is_no_text_is_refused(config, space, complaint):
    with pytest.raises(ValueError, match=complaint):
        TransformerEncoder(TransformerConfig(**config), space)
