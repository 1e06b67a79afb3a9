from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.algorithms.state import FlatAdam, seeded, weights


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 4, generator=generator)
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def network() -> nn.Module:
    with seeded(1):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("limit", [0.0, 0.1])
def test_it_steps_where_torch_steps(limit):
    ours, theirs = network(), network()
    optimiser = FlatAdam(ours.parameters(), 1e-2, eps=1e-5)
    reference = torch.optim.Adam(theirs.parameters(), 1e-2, eps=1e-5)
    for step in range(20):
        norm = optimiser.clipped_step(loss_of(ours, step), limit)
        reference.zero_grad()
        loss_of(theirs, step).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit or float("inf"))
        reference.step()
        torch.testing.assert_close(norm, expected)
    for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_parameters_are_changed_where_they_lie():
    model = network()
    optimiser = FlatAdam(model.parameters(), 1e-2)
    block = torch.zeros(8, 4)
    block.copy_(model[0].weight.detach())
    model[0].weight.data = block  # as a scheme does that shares the trainer's memory
    before = block.clone()
    optimiser.step(loss_of(model, 0))
    assert not torch.equal(block, before)
    assert model[0].weight.data_ptr() == block.data_ptr()


def test_it_goes_on_from_its_state():
    model = network()
    optimiser = FlatAdam(model.parameters(), 1e-2)
    optimiser.step(loss_of(model, 0))
    other = network()
    other.load_state_dict(weights(model))
    restored = FlatAdam(other.parameters(), 1e-2)
    restored.load_state_dict(optimiser.state_dict())
    for step in (1, 2):
        optimiser.step(loss_of(model, step))
        restored.step(loss_of(other, step))
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_seeded_weights_leave_the_global_stream_alone():
    state = torch.get_rng_state()
    first, second = network(), network()
    assert torch.equal(first[0].weight, second[0].weight)
    assert torch.equal(torch.get_rng_state(), state)
