"""Small models are copied by their memory: the same to the bit, and torch is told."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from sync.binding import Binding
from sync.raw import copy, few_floats, raw, squares_are_finite
from sync.snapshot import Snapshot
from sync.strategy import WeightStrategy

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
DTYPES += [torch.bool, torch.complex64]


def snapshot_of(binding):
    return Snapshot(binding.layout, torch.zeros(binding.layout.nbytes, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_is_copied_to_the_bit(dtype, shape):
    source = (torch.randn(shape) * 3).to(dtype)
    target = torch.zeros(shape, dtype=dtype)
    copy(raw([target]), raw([source]))
    assert torch.equal(target, source)


@pytest.mark.parametrize(
    "odd", [torch.zeros(3, 4).t(), torch.zeros(3, dtype=torch.complex64).conj(), torch.empty(0, 3)]
)
def test_what_is_not_in_one_piece_is_left_to_torch(odd):
    assert (raw([torch.zeros(2), odd]) is None) == (odd.numel() > 0)


@pytest.mark.filterwarnings("ignore:.* encountered in dot")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(bad):
    model = nn.Linear(3, 3)
    binding = Binding(model, WeightStrategy())
    snapshot = snapshot_of(binding)
    with torch.no_grad():
        model.weight[1, 1] = bad
    with pytest.raises(ValueError, match="'weight' holds 1 NaN or infinite"):
        binding.pack(snapshot, 0, check_finite=True)
    assert snapshot.version == -1


LOOK = """
import torch
from sync.raw import few_floats, squares_are_finite
for numbers in ([float("nan")], [float("inf"), float("-inf")], [3e38]):
    print(squares_are_finite(few_floats(torch.tensor(numbers * 50))))
"""


def test_to_look_whether_all_are_finite_warns_nobody():
    looked = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=60
    )
    assert (looked.stdout, looked.stderr) == ("False\n" * 3, "")


@pytest.mark.filterwarnings("ignore:overflow encountered in dot")
def test_numbers_whose_squares_are_not_finite_are_sent_all_the_same():
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(3e38)
    binding = Binding(model, WeightStrategy())
    snapshot = snapshot_of(binding)
    assert not squares_are_finite(few_floats(model.weight.detach().flatten()))
    binding.pack(snapshot, 4, check_finite=True)
    assert snapshot.version == 4
    assert snapshot.views[0].eq(3e38).all()


def test_autograd_notices_weights_that_came_between_forward_and_backward():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    binding = Binding(model, WeightStrategy())
    snapshot = snapshot_of(binding)
    binding.pack(snapshot, 0, check_finite=True)
    loss = model(torch.ones(1, 2)).sum()
    binding.load(snapshot)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_whose_memory_was_replaced_is_read_and_written_where_it_is_now():
    model = nn.Linear(4, 4)
    binding = Binding(model, WeightStrategy())
    snapshot = snapshot_of(binding)
    binding.pack(snapshot, 0, check_finite=True)
    model.weight.data = torch.full((4, 4), 5.0)
    binding.pack(snapshot, 1, check_finite=True)
    assert snapshot.views[0].eq(5.0).all()
    model.weight.data = torch.arange(16.0).reshape(4, 4).t()  # no longer in one piece
    binding.pack(snapshot, 2, check_finite=True)
    assert torch.equal(snapshot.views[0], torch.arange(16.0).reshape(4, 4).t())
    snapshot.views[0].fill_(7.0)
    binding.load(snapshot)
    assert model.weight.eq(7.0).all()
