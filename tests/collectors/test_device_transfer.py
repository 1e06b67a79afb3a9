"""Observations reach a policy's device in one copy, and its outputs come back in one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from collectors import Collector, MultiSyncCollector
from collectors.rollout.device_transfer import DeviceTransfer
from collectors.rollout.policy import PolicyCaller
from collectors.rollout.spaces import observation_leaves
from tests.collectors.support import CodeEnv, CodePolicy, same_bits

CPU = torch.device("cpu")
MIXED = {
    "bool": torch.tensor([True, False, True]),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 5).bfloat16(),
    "double": torch.randn(3, 1, dtype=torch.float64),
    "whole": torch.arange(3),
    "transposed": torch.randn(4, 3).T,
    "expanded": torch.ones(()).expand(3, 2),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(3, 0),
}


class Copies(TorchDispatchMode):
    """Counts the copies from one device to another, and of whole buffers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def same(ones, others):
    return all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        for one, other in zip(ones, others, strict=True)
    )


def test_tensors_of_any_kind_arrive_as_they_are():
    transfer = DeviceTransfer(CPU)
    for way in (transfer.to_device, transfer.to_host):
        arrived = way([*MIXED.values()])
        assert same(arrived, MIXED.values())
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in arrived)
        assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_inputs_go_in_one_copy(device):
    transfer = DeviceTransfer(torch.device(device))
    with Copies() as copies:
        arrived = transfer.to_device([None, *MIXED.values(), None])
    assert copies.count == 1
    assert arrived[0] is arrived[-1] is None
    assert {tensor.device.type for tensor in arrived[1:-1]} == {device}


def test_an_input_that_a_policy_keeps_is_not_written_again():
    transfer = DeviceTransfer(CPU)
    (kept,) = transfer.to_device([torch.zeros(3)])
    transfer.to_device([torch.ones(3)])
    transfer.to_device([torch.ones(3), torch.ones(3)])
    assert torch.equal(kept, torch.zeros(3))


def test_outputs_that_are_no_tensors_come_back_as_they_are():
    assert DeviceTransfer(CPU).to_host(["text", None, torch.ones(2)])[:2] == ["text", None]


def caller(policy, **options):
    return PolicyCaller(policy, observation_leaves(CodeEnv.observation_space), **options)


def test_a_policy_is_called_where_its_parameters_are():
    assert caller(CodePolicy().to("meta")).device == torch.device("meta")
    assert caller(nn.BatchNorm1d(5, affine=False, device="meta")).device == torch.device("meta")
    assert caller(CodePolicy()).device is None
    assert caller(lambda observation: observation).device is None
    assert caller(CodePolicy().to("meta"), device=CPU).device is None


def test_outputs_have_the_names_and_values_of_a_call_without_transfer():
    observation = torch.rand(4, 5)
    here = caller(CodePolicy())
    expected = here([observation])
    here._transfer = DeviceTransfer(CPU)
    found = here([observation])
    assert list(found) == list(expected)
    assert same(found.values(), expected.values())


class Remembering(nn.Module):
    """Counts the steps of each episode on its own device, and acts like `CodePolicy`."""

    in_keys = ("observation", "count")
    out_keys = ("action", "seen", "weights", ("next", "count"))

    def __init__(self):
        super().__init__()
        self.inner = CodePolicy()

    def forward(self, observation, count):
        assert observation.device == self.inner.number.device
        count = observation.new_zeros(len(observation)) if count is None else count
        return *self.inner(observation), count + 1


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("policy_device", [None, "cuda"])
@pytest.mark.parametrize("policy", [CodePolicy, Remembering])
def test_a_policy_on_a_gpu_makes_the_same_frames(kind, policy_device, policy):
    found = []
    for module, device in ((policy(), None), (policy().to("cuda"), policy_device)):
        with kind(CodeEnv, module, frames_per_batch=30, policy_device=device) as collector:
            collector.set_seed(1)
            found += [[collector.next(), collector.next()]]
    on_cpu, on_gpu = found
    assert all(map(same_bits, on_gpu, on_cpu))


@pytest.mark.cuda
def test_a_step_on_a_gpu_is_one_copy_each_way():
    call = caller(Remembering().to("cuda"))
    inputs = [torch.rand(4, 5), torch.zeros(4)]
    call(inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(inputs)
    copies = [event.name for event in profile.events() if "Memcpy" in event.name]
    assert sum("HtoD" in name for name in copies) == 1
    assert sum("DtoH" in name for name in copies) == 1
