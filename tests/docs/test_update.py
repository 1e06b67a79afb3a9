"""The limit that updates are compared with computes what they compute."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from docs.performance import update
from docs.performance.update_limit import Limit

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def test_the_limit_takes_the_gradient_steps_of_autograd_clipping_and_adam():
    torch.manual_seed(1)
    policy, critic = update.network(2), update.network(1)
    parameters = [*policy.parameters(), *critic.parameters()]
    limit = Limit(parameters_to_vector(parameters).detach(), update.LEARNING_RATE)
    optimiser = torch.optim.Adam(parameters, update.LEARNING_RATE, eps=1e-5)
    part = [column[: update.MINIBATCH] for column in update.columns(update.made_batch())]
    for _ in range(3):
        optimiser.zero_grad()
        update.loss(policy, critic, part).backward()
        gradient = parameters_to_vector([x.grad for x in parameters if x.grad is not None])
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimiser.step()
        limit.step(*part)
        torch.testing.assert_close(limit.gradient, gradient, rtol=1e-4, atol=1e-6)
    tiny = torch.full((1,), 1e-40)
    assert tiny * 1 > 0  # the library leaves this process's arithmetic as it was
    torch.testing.assert_close(
        limit.weights, parameters_to_vector(parameters).detach(), rtol=1e-4, atol=1e-6
    )
