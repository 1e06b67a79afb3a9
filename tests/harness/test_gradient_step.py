"""The gradient step in plain operations, as it is compiled, is the eager one. Compiles nothing."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from harness.algorithms import compiled as compiled_steps
from harness.algorithms.compiled import CompiledStep, compile_steps
from harness.algorithms.interface import Algorithm
from harness.algorithms.optimisers import Adam, RMSProp, seeded


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Functions to compile are wrapped, and run as they are."""
    monkeypatch.setattr(compiled_steps, "_compiled", lambda function: partial(function))


def step(make=Adam, *, rate: float = 1e-2, scale: float | None = None, **options) -> CompiledStep:
    with seeded(1):
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        error = (network(part["inputs"]).squeeze(-1) - part["target"]).square().mean()
        scales = {} if scale is None else {"step_scale": torch.tensor(scale)}
        return error, {"error": error, **scales}

    return CompiledStep(loss, [network], make(network.parameters(), rate), **options)


def eager_step(*arguments, **options) -> CompiledStep:
    """The same step, which is computed eagerly."""
    one = step(*arguments, **options)
    one._graph = lambda part: None
    return one


def part(length: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randn(length, 4, generator=generator)
    return {"inputs": inputs, "target": 3 * inputs.sum(1)}


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"scale": 0.3}])
@pytest.mark.parametrize("make", [Adam, RMSProp, partial(RMSProp, momentum=0.9)])
def test_the_step_that_is_compiled_is_the_eager_step(make, options):
    eager, compiled = eager_step(make, **options), step(make, **options)
    for length in (16, 7, 12):
        metrics = [one(part(length)) for one in (compiled, eager)]
        torch.testing.assert_close(*metrics)
        for one in (compiled, eager):
            one.optimiser.learning_rate *= 0.5
    torch.testing.assert_close(compiled.optimiser.parameters, eager.optimiser.parameters)
    torch.testing.assert_close(compiled.optimiser.state_dict(), eager.optimiser.state_dict())


class OfAPlugin(Algorithm):
    """An algorithm from elsewhere, whose options have a `compile` of their own."""

    is_compiled = False

    def compile_steps(self) -> None:
        self.is_compiled = True


def test_an_algorithm_of_a_plugin_compiles_its_own_steps():
    algorithm = OfAPlugin()
    compile_steps(algorithm, "mlp")
    assert algorithm.is_compiled


def test_an_algorithm_without_compiled_steps_is_refused():
    message = "algo.compile=true: Algorithm has no method compile_steps; expected false"
    with pytest.raises(ValueError, match=re.escape(message)):
        compile_steps(Algorithm(), "mlp")


def test_an_eager_run_goes_on_from_a_compiled_one():
    eager, compiled = eager_step(), step()
    for _ in range(3):
        compiled(part())
    eager.loss.load_state_dict(compiled.loss.state_dict())
    eager.optimiser.load_state_dict(compiled.optimiser.state_dict())
    torch.testing.assert_close(compiled(part()), eager(part()))


def test_which_graph_takes_a_step_depends_on_the_length_alone():
    one = step(varying=("inputs", "target"), usual=16)
    graphs = [one._graph(part(length)) for length in (16, 7, 16, 12, 1)]
    assert graphs == [one.compiled, one.of_any_length, one.compiled, one.of_any_length, None]
    assert one.compiled is not one.of_any_length
    assert step()._graph(part(7)) is not None


def test_parameters_are_changed_where_they_lie():
    one = step()
    block = torch.zeros(8, 4)
    weight = one.optimiser.parameters[0]
    block.copy_(weight.detach())
    weight.data = block  # as a scheme does that shares the trainer's memory
    before = block.clone()
    one(part())
    assert not torch.equal(block, before)
    assert weight.data_ptr() == block.data_ptr()
