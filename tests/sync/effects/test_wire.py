"""What each wire format does to weights: to which bit, at what size, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sync import (
    WIRES,
    Layout,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from sync.effects.pipeline import Parcel, Pipeline
from sync.effects.rounding import RoundedFormat, check_wire, measure_error
from sync.model.block import private_snapshot
from tests.sync.effects.fakes import FakeSender
from tests.sync.remote.support import joined
from tests.sync.support import bits, held, receive, running, sender, tensors, version

COPYING = pytest.mark.parametrize("kind", ["shared_copy", "multiprocess"])
LOSSY = ("bfloat16", "float16", "int8")
EXACT = ("float32",)


class Varied(nn.Module):
    """Leaves of many types and shapes: matrix, filter, narrow matrix, scalar, none at all."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(40, 33, generator=generator))
        self.filters = nn.Parameter(torch.randn(6, 3, 5, 5, generator=generator) * 1e-3)
        self.narrow = nn.Parameter(torch.randn(50, 2, generator=generator))
        self.scalar = nn.Parameter(torch.randn((), generator=generator))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.zeros = nn.Parameter(torch.zeros(8, 8))
        self.register_buffer("doubled", torch.randn(9, generator=generator).double())
        self.register_buffer("halved", torch.randn(7, generator=generator).half())
        self.register_buffer("brain", torch.randn(7, generator=generator).bfloat16())
        self.register_buffer("imaginary", torch.randn(5, dtype=torch.cfloat, generator=generator))
        self.register_buffer("count", torch.tensor(2**53 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))


def made(kind: str, wire: str, model: nn.Module, workers: int = 1, **options) -> WeightSyncScheme:
    return sender(kind, model, workers, wire=wire, **options)


def step(model: nn.Module, size: float = 1e-3) -> None:
    """A small step of training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter))


def values(scheme, model):
    return {name: tensor.detach().clone() for name, tensor in tensors(model)}


def publish(scheme, worker):
    scheme.send_async()
    assert worker.do(receive)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@COPYING
def test_two_byte_wires_bring_what_torch_rounds_to(kind, wire):
    model = Varied()
    with running(made(kind, wire, model, round_buffers=True), Varied) as (worker,):
        arrived = worker.do(values)
        for name, sent in tensors(model):
            if sent.is_floating_point() and sent.element_size() > 2:
                sent = sent.detach().to(getattr(torch, wire)).to(sent.dtype)
            assert torch.equal(arrived[name], sent), name


@pytest.mark.parametrize("wire", WIRES)
@COPYING
def test_the_measured_error_is_the_one_that_arrives(kind, wire):
    model = Varied()
    scheme = made(kind, wire, model)
    with running(scheme, Varied) as (worker,):
        arrived = worker.do(values)
        pairs = [(t.detach(), arrived[name]) for name, t in tensors(model) if t.is_floating_point()]
        off = [(found.double() - sent.double()) for sent, found in pairs]
        largest = max(float(d.abs().max()) for d in off if d.numel())
        worst = max(
            math.sqrt(float(d.square().sum() / sent.double().square().sum()))
            for d, (sent, _) in zip(off, pairs, strict=True)
            if sent.any()
        )
        stats = scheme.stats["wire"]
        assert stats["max_error"] == pytest.approx(largest, rel=1e-4)
        assert stats["error"] == pytest.approx(worst, rel=1e-4)
        assert (stats["error"] == 0) == (wire in EXACT)


@COPYING
def test_bytes_are_those_that_travel(kind):
    model = nn.Linear(300, 300)
    found = {}
    for wire in WIRES:
        scheme = made(kind, wire, model)
        with running(scheme, lambda: nn.Linear(300, 300)) as (worker,):
            whole = scheme.stats["bytes"]
            step(model, 1e-5)
            publish(scheme, worker)
            found[wire] = scheme.stats["bytes"] - whole
            saved = scheme.stats["wire"]["saved_bytes"]
            assert saved + scheme.stats["bytes"] == 2 * found["float32"]
    assert found["float32"] == pytest.approx(4 * 300 * 301, rel=0.01)
    assert found["bfloat16"] == found["float16"] == pytest.approx(2 * 300 * 301, rel=0.01)
    assert found["int8"] == pytest.approx(300 * 301 + 4 * 301, rel=0.01)


@COPYING
def test_what_float16_cannot_hold_is_refused_and_workers_keep_what_they_have(kind):
    model = nn.Linear(4, 4)
    scheme = made(kind, "float16", model, check_finite=False)
    with running(scheme, lambda: nn.Linear(4, 4)) as (worker,):
        before = worker.do(held)
        with torch.no_grad():
            model.weight[1, 2:] = 1e5
        with pytest.raises(ValueError, match=r"'weight' holds 2 value.*1e\+05.*wire=bfloat16"):
            scheme.send()
        assert not worker.do(receive)
        assert worker.do(held) == before
        with torch.no_grad():
            model.weight[1, 2:] = math.inf
        scheme.send_async()
        assert worker.do(receive)
        assert torch.isinf(worker.do(values)["weight"][1, 2:]).all()
        assert worker.do(version) == 1


@pytest.mark.parametrize("check_finite", [True, False])
@COPYING
def test_int8_refuses_what_is_not_finite(kind, check_finite):
    model = nn.Linear(4, 4)
    scheme = made(kind, "int8", model, check_finite=check_finite)
    with running(scheme, lambda: nn.Linear(4, 4)):
        with torch.no_grad():
            model.bias[1] = math.nan
        with pytest.raises(ValueError, match=r"'bias' holds 1 NaN.*int8"):
            scheme.send()


def test_numbers_too_small_for_a_scale_become_zero():
    model = nn.Linear(8, 2)
    with torch.no_grad():
        model.weight.fill_(1e-45)
        model.bias.fill_(1e-41)
    with running(made("shared_copy", "int8", model), lambda: nn.Linear(8, 2)) as (worker,):
        arrived = worker.do(values)
        assert torch.isfinite(arrived["bias"]).all()
        assert (arrived["weight"] - model.weight).abs().max() <= 1e-44


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "float32"])
def test_what_was_decoded_is_in_memory_of_the_models_own(wire):
    model = nn.Linear(512, 512)
    scheme = SharedMemWeightSyncScheme(wire=wire)
    scheme.init_on_sender(model=model, devices=["cpu"])
    with running(scheme, lambda: nn.Linear(512, 512)) as (worker,):
        worker.do(lambda s, m: m.weight.data.zero_())  # memory of its own


class Bounded(nn.Module):
    """A model with buffers and vectors whose numbers differ by orders of magnitude."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bounds", torch.tensor([1.0, 500.0, 1e-6]))
        self.register_buffer("centre", torch.tensor([[1013.5, 0.02]]))
        self.register_buffer("unknown", torch.tensor([-1.0, 1.0]))
        self.bias = nn.Parameter(torch.cat([torch.full((64,), 1e-3), torch.full((70,), 1e3)]))


@pytest.mark.parametrize("round_buffers", [False, True])
@pytest.mark.parametrize("wire", LOSSY)
def test_rounding_wires_bring_buffers_as_they_are_unless_they_are_to_be_rounded(
    wire, round_buffers
):
    ours, theirs = Bounded(), Bounded()
    if not round_buffers:
        ours.unknown.copy_(torch.tensor([math.nan, math.inf]))
    with joined(ours, theirs, wire=wire, round_buffers=round_buffers):
        arrived, sent = bits(theirs), bits(ours)
        for name in ("bounds", "centre"):
            assert (arrived[name] == sent[name]) == (not round_buffers)
        assert arrived["unknown"] == sent["unknown"]


@pytest.mark.parametrize("wire", LOSSY)
def test_an_encoded_version_has_the_publish_time_of_its_original(wire):
    layout = Layout.of({"weight": torch.zeros(20, 10)})
    encoder = RoundedFormat.of(wire, layout)
    pipeline = Pipeline(FakeSender(encoder.layout, 1), layout, encoder=encoder)
    block = pipeline.free_block([])
    block.stamp(0, b"", published_ns=12_345)
    outgoing = pipeline.write(Parcel(block, [0]))
    assert outgoing.block.published_ns == 12_345


def test_int8_rounds_to_127ths_of_the_largest_number_of_each_block():
    numbers = torch.zeros(70)  # a block of 64 numbers, and one of 6
    numbers[:3] = torch.tensor([127.0, -64.4, 0.4])
    numbers[64:] = torch.tensor([0.1, -2.54, 1.0, 0.011, -0.009, 0.0])
    model = Layout.of({"numbers": numbers})
    format_ = RoundedFormat.of("int8", model)
    whole, arrived = private_snapshot(model), private_snapshot(model)
    block = private_snapshot(format_.layout)
    whole.views[0].copy_(numbers)
    format_.write(whole, block)
    format_.read(block, arrived)
    expected = torch.zeros(70)
    expected[:2] = torch.tensor([127.0, -64.0])  # steps of 1
    expected[64:] = torch.tensor([0.1, -2.54, 1.0, 0.02, 0.0, 0.0])  # of 0.02
    torch.testing.assert_close(arrived.views[0], expected)


def test_numbers_that_are_not_finite_have_no_part_in_the_measured_error():
    sent = torch.tensor([3.0, math.inf, math.nan, 4.0])
    decoded = torch.tensor([3.0, math.inf, math.nan, 4.5])
    assert measure_error([sent], [decoded]) == (0.5, pytest.approx(0.5 / 5))


def test_a_row_of_four_numbers_has_a_scale_of_its_own_and_shorter_ones_share():
    for shape, scales in (((5, 4), 5), ((5, 3), 1), ((2, 2, 2), 2), ((100,), 2)):
        model = Layout.of({"rows": torch.zeros(shape)})
        leaves = RoundedFormat.of("int8", model).layout.leaves
        (scale,) = (leaf for leaf in leaves if leaf.name.endswith("(scale)"))
        assert scale.shape == (scales, 1)


def test_int8_divides_no_numbers_by_zero():
    tiny = torch.full((8, 8), 1e-45)  # its scale would underflow
    model = Layout.of({"zeros": torch.zeros(8, 8), "tiny": tiny})
    format_ = RoundedFormat.of("int8", model)
    whole, block = private_snapshot(model), private_snapshot(format_.layout)
    whole.views[1].copy_(tiny)
    format_.write(whole, block)
    scales = [
        view
        for leaf, view in zip(format_.layout.leaves, block.views, strict=True)
        if leaf.name.endswith("(scale)")
    ]
    assert len(scales) == 2
    assert all((scale > 0).all() for scale in scales)


def test_a_format_of_an_earlier_version_is_refused_with_what_replaces_it():
    with pytest.raises(ValueError, match=r"wire='delta': .* use 'float32', .*, or 'bfloat16'"):
        check_wire("delta")
