"""Models on CUDA devices: copies in the right order, checks on the device, page-locked blocks."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from sync.model.binding import Binding
from sync.model.block import private_snapshot
from sync.model.strategy import WeightStrategy
from tests.sync.model.test_strategy import Everything
from tests.sync.support import bits, fill

pytestmark = pytest.mark.cuda
SIZE = 1000


class Mixed(nn.Module):
    """A policy on a device that keeps a buffer in CPU memory."""

    def __init__(self, value: float = 0.0):
        super().__init__()
        options = {"fill_value": value, "dtype": torch.float32}
        self.weight = nn.Parameter(torch.full((SIZE, SIZE), device="cuda", **options))
        self.register_buffer("mean", torch.full((SIZE,), device="cuda", **options))
        self.register_buffer("steps", torch.full((50_000,), **options))


def bind(model, layout=None):
    return Binding(model, WeightStrategy(), layout)


def snapshot_of(model, version=0):
    binding = bind(model)
    written = private_snapshot(binding.layout)
    binding.check(check_finite=True)
    binding.pack(written, version)
    return written


def values(snapshot):
    return {float(value) for view in snapshot.views for value in view.unique()}


def keep_busy():
    """Queue work on the current stream that takes long beside a copy."""
    numbers = torch.eye(4096, device="cuda")
    for _ in range(100):
        numbers = numbers @ numbers


@pytest.mark.parametrize("to", ["cpu", "cuda"])
@pytest.mark.parametrize("frm", ["cpu", "cuda"])
def test_snapshots_go_between_devices(frm, to):
    source, destination = Everything(3.0).to(frm), Everything(1.0).to(to)
    written = snapshot_of(source)
    bind(destination, written.layout).load(written)
    assert bits(destination.cpu()) == bits(source.cpu())


def test_each_tensor_is_copied_where_it_is():
    source, destination = Mixed(3), Mixed(1)
    written = snapshot_of(source)
    assert values(written) == {3}
    binding = bind(destination, written.layout)
    binding.load(written)
    assert binding.accelerator == destination.weight.device
    assert (destination.weight.is_cuda, destination.steps.is_cuda) == (True, False)
    assert bits(destination.cpu()) == bits(source.cpu())


def test_a_model_that_moves_to_a_device_is_followed():
    model = nn.Linear(SIZE, SIZE)
    binding = bind(fill(model, 1))
    written = private_snapshot(binding.layout)
    assert binding.accelerator is None
    model.to("cuda")
    fill(model, 2)
    binding.pack(written, 0)
    assert values(written) == {2}
    assert binding.accelerator == model.weight.device


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_value_that_is_not_finite_is_found_on_the_device(bad):
    model = Mixed(1)
    binding = bind(model)
    with torch.no_grad():
        model.weight[3, 4] = bad
    with pytest.raises(ValueError, match="'weight' holds 1 NaN or infinite"):
        binding.check(check_finite=True)
    binding.check(check_finite=False)


@pytest.mark.parametrize("name", ["mean", "steps"])
def test_buffers_are_checked_if_all_are_to_be(name):
    model = Mixed(1)
    getattr(model, name)[5] = float("-inf")
    binding = bind(model)
    written = private_snapshot(binding.layout)
    binding.pack(written, 0)
    with pytest.raises(ValueError, match=f"'{name}' holds 1 NaN or infinite"):
        binding.check(check_finite="all")


def test_large_finite_values_are_accepted():
    assert values(snapshot_of({"a": torch.full((SIZE,), 2.0**127, device="cuda")})) == {2.0**127}


def test_packing_comes_after_what_the_caller_has_queued():
    model = Mixed(1)
    binding = bind(model)
    written = private_snapshot(binding.layout)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        keep_busy()
        fill(model, 2)
        binding.pack(written, 0)
    assert values(written) == {2}


def test_what_follows_a_pack_does_not_change_the_block():
    model = Mixed(1)
    binding = bind(model)
    written = private_snapshot(binding.layout)
    for version in range(3):
        fill(model, version)
        binding.pack(written, version)
        fill(model, 100)
        torch.cuda.synchronize()
        assert values(written) == {version}


def test_a_block_may_be_rewritten_as_soon_as_it_was_loaded():
    model, written = Mixed(0), snapshot_of(Mixed(3))
    binding = bind(model, written.layout)
    for _ in range(3):  # page-locked from the second time on
        fill(model, 0)
        kept = written.buffer.clone()
        binding.load(written)
        written.buffer.zero_()
        torch.cuda.synchronize()
        assert bits(model.cpu()) == bits(Mixed(3).cpu())
        model.to("cuda")
        written.buffer.copy_(kept)


def test_a_load_waits_for_a_forward_pass_on_another_threads_stream():
    model, first, second = Mixed(0), snapshot_of(Mixed(1)), snapshot_of(Mixed(2))
    binding = bind(model, first.layout)
    binding.load(first)
    seen = []

    def forward():
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            keep_busy()
            seen.append(model.weight.clone())
            binding.after_use()

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    binding.load(second)
    torch.cuda.synchronize()
    assert seen[0].eq(1).all()
    assert model.weight.eq(2).all()


def test_a_load_waits_for_a_forward_pass_of_its_own_thread():
    model, first, second = Mixed(0), snapshot_of(Mixed(1)), snapshot_of(Mixed(2))
    binding = bind(model, first.layout)
    binding.load(first)
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        keep_busy()
        seen = model.weight.clone()
        binding.load(second)
    torch.cuda.synchronize()
    assert seen.eq(1).all()
    assert model.weight.eq(2).all()


def test_a_block_is_page_locked_while_it_is_used_and_released_with_it():
    model = Mixed(1)
    binding = bind(model)
    written = private_snapshot(binding.layout)
    memory = written.buffer
    for version in range(3):
        binding.pack(written, version)
        assert memory.is_pinned() == (version > 0)
    del written
    gc.collect()
    assert not memory.is_pinned()


def test_memory_that_cannot_be_page_locked_is_copied_all_the_same():
    model = Mixed(3)
    binding = bind(model)
    first = private_snapshot(binding.layout)
    second = type(first)(first.layout, first.buffer)  # the same memory: locked once already
    for block in (first, second):
        for version in range(3):
            binding.pack(block, version)
    assert values(second) == {3}
    torch.ones(3, device="cuda").add_(1)  # the failure is not reported here
    torch.cuda.synchronize()


def test_packing_takes_no_second_model_on_the_device():
    model = nn.Linear(4096, 4096, device="cuda")
    binding = bind(model)
    written = private_snapshot(binding.layout)
    binding.pack(written, 0)
    binding.load(written)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    binding.pack(written, 1)
    binding.load(written)
    assert torch.cuda.max_memory_allocated() - before < written.layout.nbytes // 4
