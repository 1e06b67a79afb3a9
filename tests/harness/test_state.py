from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.algorithms.optimisers import Adam, RMSProp, seeded
from harness.saved_state import weights

ROOT = Path(__file__).resolve().parents[2]


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
    optimiser = Adam(ours.parameters(), 1e-2, eps=1e-5)
    reference = torch.optim.Adam(theirs.parameters(), 1e-2, eps=1e-5)
    for step in range(20):
        norm = optimiser.step(loss_of(ours, step), limit)
        reference.zero_grad()
        loss_of(theirs, step).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit or float("inf"))
        reference.step()
        torch.testing.assert_close(norm, expected)
    for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_steps_where_torch_steps(momentum):
    ours, theirs = network(), network()
    options = {"alpha": 0.99, "eps": 1e-3, "momentum": momentum}
    optimiser = RMSProp(ours.parameters(), 1e-2, **options)
    reference = torch.optim.RMSprop(theirs.parameters(), 1e-2, **options)
    for step in range(20):
        optimiser.step(loss_of(ours, step), 0.1)
        reference.zero_grad()
        loss_of(theirs, step).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        reference.step()
    for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", [Adam, RMSProp])
def test_parameters_are_changed_where_they_lie(kind):
    model = network()
    optimiser = kind(model.parameters(), 1e-2)
    block = torch.zeros(8, 4)
    block.copy_(model[0].weight.detach())
    model[0].weight.data = block  # as a scheme does that shares the trainer's memory
    before = block.clone()
    optimiser.step(loss_of(model, 0))
    assert not torch.equal(block, before)
    assert model[0].weight.data_ptr() == block.data_ptr()


@pytest.mark.parametrize("kind", [Adam, RMSProp, partial(RMSProp, momentum=0.9)])
def test_it_goes_on_from_its_state(kind):
    model = network()
    optimiser = kind(model.parameters(), 1e-2)
    optimiser.step(loss_of(model, 0))
    other = network()
    other.load_state_dict(weights(model))
    restored = kind(other.parameters(), 1e-2)
    restored.load_state_dict(optimiser.state_dict())
    for step in (1, 2):
        optimiser.step(loss_of(model, step))
        restored.step(loss_of(other, step))
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_a_state_is_a_copy_that_later_steps_leave_alone():
    model = network()
    optimiser = Adam(model.parameters(), 1e-2)
    optimiser.step(loss_of(model, 0))
    state = optimiser.state_dict()
    optimiser.step(loss_of(model, 1))
    assert state["step.0"] == 1
    assert not torch.equal(state["mean.0"], optimiser.state_dict()["mean.0"])


def test_a_gradient_of_one_number_for_all_elements_is_followed():
    """Autograd gives the gradient of a sum as one number of stride zero."""
    parameter = nn.Parameter(torch.zeros(3))
    Adam([parameter], 0.5).step(parameter.sum())
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.5))


@pytest.mark.parametrize("kind", [Adam, RMSProp])
def test_a_parameter_that_the_loss_does_not_use_stays_as_it_is(kind):
    used, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(2))
    kind([used, unused], 0.5).step(used.sum(), 1.0)
    assert torch.equal(unused.detach(), torch.ones(2))


@pytest.mark.parametrize("kind", ["Adam", "RMSProp"])
def test_a_step_does_not_import_the_compiler(kind):
    """`torch.optim.Adam` does, which takes a second and 74 MB in every run."""
    code = f"""
import sys
import sync
from torch import nn
from harness.algorithms.optimisers import {kind}
model = nn.Linear(2, 1)
{kind}(model.parameters(), 0.1).step(model.weight.sum(), 1.0)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_seeded_weights_leave_the_global_stream_alone():
    state = torch.get_rng_state()
    first, second = network(), network()
    assert torch.equal(first[0].weight, second[0].weight)
    assert torch.equal(torch.get_rng_state(), state)
