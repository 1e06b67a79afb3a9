"""A model bound to a layout: packed as it is now, loaded where it is now."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict, UserDict

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from sync.model.binding import Binding
from sync.model.block import private_snapshot
from sync.model.strategy import WeightStrategy
from tests.sync.model.test_strategy import Parts
from tests.sync.support import Counting, bits, fill, policy

STRATEGY = WeightStrategy()


def bind(target, layout=None):
    return Binding(target, STRATEGY, layout)


def snapshot_of(source, version=0):
    binding = bind(source)
    written = private_snapshot(binding.layout)
    binding.check(check_finite=True)
    binding.pack(written, version)
    return written


# What a user may do to a model after it was bound.


def assign(model):
    model[0].weight = nn.Parameter(torch.full((4, 3), 8.0))


def repoint(model):
    model[0].weight.data = torch.full((4, 3), 8.0)


def assign_buffer(model):
    model[1].running_mean = torch.full((4,), 8.0)


def replace_layer(model):
    model[0] = fill(nn.Linear(3, 4), 8.0)


def transpose(model):
    model[3].weight.data = model[3].weight.data.t()


CHANGES = [assign, repoint, assign_buffer, replace_layer, transpose]


def numbered(first=0):
    """A policy with a number of its own in every place."""
    model = policy().append(nn.Linear(4, 4))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.arange(first, first + tensor.numel()).reshape(tensor.shape))
            first += tensor.numel()
    return model


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_sender_packs_what_the_model_holds_now(change):
    model = numbered()
    binding = bind(model)
    written = private_snapshot(binding.layout)
    binding.pack(written, 0)
    change(model)
    binding.pack(written, 1)
    arrived = numbered()
    bind(arrived, binding.layout).load(written)
    assert bits(arrived) == bits(model)


@pytest.mark.parametrize("pointing", [False, True], ids=["copying", "pointing"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_receiver_loads_into_what_the_model_uses_now(change, pointing):
    source, model = numbered(1000), numbered()
    written = snapshot_of(source)
    binding = bind(model, written.layout)
    apply = binding.point_at if pointing else binding.load
    apply(written)
    change(model)
    apply(written)
    assert bits(model) == bits(source)


@pytest.mark.parametrize("form", [dict, TensorDict, OrderedDict, UserDict])
def test_an_entry_that_was_replaced_is_found_again(form):
    weights = form({"a": form({"b": torch.zeros(2)}), "c": torch.zeros(2)})
    binding = bind(weights)
    written = private_snapshot(binding.layout)
    weights["c"] = torch.ones(2)
    weights["a"]["b"] = torch.ones(2)
    binding.pack(written, 0)
    assert all((view == 1).all() for view in written.views)
    weights["a"] = form({"b": torch.full((2,), 2.0)})
    binding.pack(written, 1)
    assert {view.sum().item() for view in written.views} == {2.0, 4.0}


def put_another(model):
    model[0].weight = nn.Parameter(torch.zeros(4, 4))


def cut(model):
    model[0].weight.data = model[0].weight.data[:2]


def add_layer(model):
    model.append(nn.Linear(2, 2))


def add_buffer(model):
    model[1].register_buffer("noise", torch.zeros(1))


def take_a_place(model):
    model[2].bias = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put_another, r"'0.weight' has shape \[4, 4\], expected \[4, 3\]"),
        (cut, r"'0.weight' has shape \[2, 3\], expected \[4, 3\]"),
        (add_layer, "has '3.weight', '3.bias', which is not expected"),
        (add_buffer, "has '1.noise', which is not expected"),
        (take_a_place, "has '2.bias', which is not expected"),
    ],
)
def test_a_model_that_no_longer_fits_is_refused_when_it_is_packed(change, text):
    model = policy()
    model[2] = nn.Linear(4, 2, bias=False)
    binding = bind(model)
    change(model)
    for _ in range(2):
        with pytest.raises((KeyError, ValueError), match=text):
            binding.check(check_finite=True)


def test_what_a_model_keeps_for_itself_alone_may_come_later():
    model = policy()
    model[1].register_buffer("empty", None, persistent=False)
    binding = bind(model)
    written = private_snapshot(binding.layout)
    model[1].register_buffer("cache", torch.zeros(1), persistent=False)
    model[1].empty = torch.zeros(1)
    with torch.no_grad():
        model[0].weight.fill_(3)
    binding.pack(written, 0)
    assert (
        written.views[[leaf.name for leaf in binding.layout.leaves].index("0.weight")].eq(3).all()
    )


@pytest.mark.parametrize("form", [dict, TensorDict])
def test_an_entry_that_was_added_is_refused_when_weights_are_packed(form):
    weights = form({"a": form({"b": torch.zeros(2)})})
    binding = bind(weights)
    weights["a"]["c"] = torch.zeros(2)
    with pytest.raises(KeyError, match=r"has 'a\.c', which is not expected"):
        binding.check(check_finite=True)


def test_pointing_shares_parameters_and_copies_buffers():
    source = fill(policy(), 3)
    written = snapshot_of(source)
    model = policy(1)
    parameters = list(model.parameters())
    binding = bind(model, written.layout)
    binding.point_at(written)
    assert bits(model) == bits(source)
    inside = range(written.buffer.data_ptr(), written.buffer.data_ptr() + written.buffer.numel())
    assert all(p.data_ptr() in inside for p in model.parameters())
    assert not any(b.data_ptr() in inside for b in model.buffers())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    binding.detach_from_snapshots()
    assert bits(model) == bits(source)
    assert not any(p.data_ptr() in inside for p in model.parameters())


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("pointing", [False, True], ids=["copying", "pointing"])
def test_a_backward_pass_through_weights_that_changed_is_an_error(pointing, size):
    model = nn.PReLU(size)
    first, second = snapshot_of(fill(nn.PReLU(size), 1)), snapshot_of(fill(nn.PReLU(size), 2))
    binding = bind(model, first.layout)
    apply = binding.point_at if pointing else binding.load
    apply(first)
    loss = model(-torch.ones(3, size, requires_grad=True)).sum()
    apply(second)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("make", [policy, Parts])
def test_a_model_gets_memory_of_its_own_with_what_it_held(make):
    written = snapshot_of(fill(make(), 3))
    model = make()
    binding = bind(model, written.layout)
    binding.point_at(written)
    binding.detach_from_snapshots()
    written.buffer.zero_()
    assert bits(model) == bits(fill(make(), 3))
    binding.load(snapshot_of(fill(make(), 4)))
    assert bits(model) == bits(fill(make(), 4))
    assert not written.buffer.any()


def test_a_model_in_cpu_memory_has_no_accelerator_and_its_use_is_of_no_consequence():
    binding = bind(policy())
    assert binding.accelerator is None
    binding.after_use()


ALONE = """
import os
import torch
from sync import WeightStrategy
from sync.model.binding import Binding
from sync.model.block import private_snapshot

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
model = {
    "large": torch.ones(1000, 1000),
    "odd": torch.ones(70_001),
    "half": torch.ones(70_000).half(),
    "turned": torch.ones(64, 40_000).t(),
}
binding = Binding(model, WeightStrategy())
block = private_snapshot(binding.layout)
before = threads()
torch.set_num_threads(3)
binding.pack(block, 0)
binding.load(block)
assert threads() == before, "packing or loading used several threads"
torch.ones(1_000_000).mul_(2)
assert threads() > before, "torch used one thread, so this has shown nothing"
assert not torch.cuda.is_initialized()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_a_model_is_packed_and_loaded_on_one_thread_and_without_cuda():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_weights_of_a_binding_stay_current():
    model = policy(1)
    written = snapshot_of(policy(3))
    binding = bind(model, written.layout)
    weights = binding.weights()
    binding.load(written)
    assert bits(weights) == bits(policy(3))
    binding.point_at(snapshot_of(policy(4)))
    assert bits(binding.weights()) == bits(policy(4))
    model[0].weight = nn.Parameter(torch.zeros(4, 3))
    binding.leaves()
    assert bits(binding.weights()) == bits(model)


# Values that are not finite.


class Masked(nn.Module):
    """A policy that masks actions with negative infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0]))
        self.register_buffer("scratch", torch.tensor([float("nan")]), persistent=False)


@pytest.mark.parametrize("name", ["weight", "mask", "scratch"])
def test_buffers_are_checked_if_all_are_to_be(name):
    model = fill(Masked(), 1)
    binding = bind(model)
    written = private_snapshot(binding.layout)
    binding.pack(written, 0)
    with torch.no_grad():
        getattr(model, name)[0] = float("nan")
    with pytest.raises(ValueError, match=f"'{name}' holds 1 NaN"):
        binding.check(check_finite="all")
    assert written.version == 0
    binding.check(check_finite=False)


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
def test_weights_of_another_form_are_checked_like_the_model(form):
    strategy = WeightStrategy(form)
    layout = Binding(Masked(), strategy).layout
    weights = strategy.extract_weights(Masked())
    binding = Binding(weights, strategy, layout)
    written = private_snapshot(layout)
    binding.pack(written, 0)
    weights["weight"][0] = float("nan")
    with pytest.raises(ValueError, match="'weight' holds 1 NaN"):
        binding.check(check_finite=True)


def test_all_of_a_dict_counts_as_parameters():
    with pytest.raises(ValueError, match="'mask' holds 1 NaN or infinite"):
        snapshot_of(dict(Masked().state_dict()))


# Extra state.


def test_an_owner_that_refuses_leaves_everything_as_it_is_now_not_as_it_was_bound():
    source = nn.Sequential(Counting("new"), Counting("new"))
    destination = nn.Sequential(Counting("bound"), Counting("bound", refuses=True))
    written = snapshot_of(fill(source, 1))
    binding = bind(destination, written.layout)
    destination[0].extra = destination[1].extra = "since changed"
    for apply in (binding.load, binding.point_at):
        with pytest.raises(RuntimeError, match="this owner refuses"):
            apply(written)
        assert [module.extra for module in destination] == ["since changed"] * 2
        assert all((module.weight == 0).all() for module in destination)


def test_a_snapshot_without_the_extra_state_that_a_model_needs_is_refused_by_name():
    layout = bind(Counting("some")).layout
    written = private_snapshot(layout)
    bind({"weight": torch.ones(2)}, layout).pack(written, 0)
    model = Counting("before")
    with pytest.raises(KeyError, match="'_extra_state'"):
        bind(model, layout).load(written)
    assert model.extra == "before"
    assert (model.weight == 0).all()


def test_a_snapshot_with_extra_state_that_the_model_has_not_is_refused_by_name():
    written = snapshot_of(fill(Counting("some"), 1))
    plain = {"weight": torch.zeros(2)}
    with pytest.raises(KeyError, match="'_extra_state'"):
        bind(plain, written.layout).load(written)
    assert (plain["weight"] == 0).all()


def test_extra_state_goes_into_a_tensordict():
    written = snapshot_of(nn.Sequential(Counting({"seen": 3})))
    weights = WeightStrategy().extract_weights(nn.Sequential(Counting()))
    bind(weights, written.layout).load(written)
    assert isinstance(weights, TensorDict)
    assert weights["0", "_extra_state"] == {"seen": 3}
