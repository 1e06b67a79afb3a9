"""What travels in a call comes out the same."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from sync.remote.pickled_calls import CallOutcome, pack, unpack


def sent(thing):
    packed = pack(thing)
    return unpack(packed.data, [tensor.clone() for tensor in packed.tensors])


def one_more(x):
    return x + 1


def test_nested_things_functions_and_tensors_come_out_the_same():
    td = TensorDict({"a": torch.arange(6).view(2, 3), "b": {"c": torch.rand(3, 2).T}}, [2])
    there, number, function, empty = sent((td, torch.tensor(3.0), one_more, torch.ones(0)))
    assert (there == td).all()
    assert number == 3.0
    assert function(1) == 2
    assert empty.shape == (0,)


def test_arrays_travel_beside_the_pickle_and_not_in_it():
    packed = pack({"weights": np.zeros(100_000, np.float32)})
    assert len(packed.data) < 1_000
    assert [tensor.numel() for tensor in packed.tensors] == [400_000]


def test_a_tensor_of_one_element_travels_whatever_its_stride():
    repeated = torch.arange(3.0)[2:].as_strided((1,), (0,), 2)
    assert torch.equal(unpack(*pack(repeated)), torch.tensor([2.0]))


def test_an_array_that_is_there_twice_travels_once():
    array = np.ones(3)
    packed = pack([array, array])
    assert len(packed.tensors) == 1


def test_modules_keep_their_parameters_and_tensors_their_gradients():
    model = nn.Linear(2, 3)
    twin = sent(model)
    assert torch.equal(twin.weight, model.weight)
    assert twin.weight.requires_grad
    assert sent(torch.ones(2, requires_grad=True)).requires_grad
    assert not sent(torch.ones(2)).requires_grad


def test_what_is_raised_comes_back_with_its_traceback():
    def fail(number):
        raise ValueError(f"bad {number}")

    future: Future = Future()
    sent(CallOutcome.of(fail, (7,))).tell(future, "peer 1")
    with pytest.raises(ValueError, match="bad 7") as raised:
        future.result()
    assert "in peer 1:\nTraceback" in raised.value.__notes__[0]


class Awkward(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_travel_is_told_in_words():
    def fail():
        raise Awkward(1, 2)

    future: Future = Future()
    sent(CallOutcome.of(fail, ())).tell(future, "peer 1")
    with pytest.raises(RuntimeError, match="Awkward: 1 and 2"):
        future.result()


def test_a_result_that_cannot_travel_is_an_error():
    packed = CallOutcome(True, (number for number in range(3))).packed()
    assert not unpack(packed.data, packed.tensors).fine
