"""Weights through shared memory: pointed at or copied, each slot kept as long as it is read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sync import SharedMemWeightSyncScheme, WorkerRaised
from sync.schemes.shared_mem import FREE
from tests.sync.support import Worker, bits, connect, fill, held, policy, receive, running


def scheme_of(model=None, workers=1, **options):
    scheme = SharedMemWeightSyncScheme(**options)
    scheme.init_on_sender(model=policy(1) if model is None else model, devices=["cpu"] * workers)
    return scheme


def addresses(scheme, model):
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


def moved(scheme, make_model):
    """Which of a worker's tensors had another address after one more version."""
    with running(scheme, make_model) as (worker,):
        before = worker.do(addresses)
        scheme.send_async(fill(make_model(), 3))
        assert worker.do(receive)
        after = worker.do(addresses)
        return [a != b for a, b in zip(before, after, strict=True)]


def test_pointing_moves_parameters_and_copying_moves_nothing():
    count = len(list(policy().parameters()))
    total = count + len(list(policy().buffers()))
    pointing = moved(scheme_of(zero_copy=True), policy)
    assert pointing == [True] * count + [False] * (total - count)
    assert moved(scheme_of(), policy) == [False] * total


@pytest.mark.parametrize("numel", [50_000, 75_000, 10_000_000], ids=["200k", "300k", "40M"])
def test_by_default_a_worker_may_write_to_its_parameters_at_any_size(numel):
    def add_noise(scheme, model):
        with torch.no_grad():
            model.weight.add_(1.0)
        return model.weight.mean().item()

    def make_model():
        return fill(nn.Linear(numel, 1, bias=False), 2)

    scheme = scheme_of(make_model())
    with running(scheme, make_model) as (worker,):
        assert worker.do(add_noise) == 3.0
        scheme.send_async(fill(make_model(), 5))
        assert worker.do(receive)
        assert worker.do(add_noise) == 6.0


def test_after_shutdown_a_worker_may_write_to_its_parameters_again():
    def end(scheme, model):
        scheme.shutdown()
        fill(model, 7)

    with running(scheme_of(zero_copy=True), method="fork") as (worker,):
        worker.do(lambda s, m: m[1].running_mean.fill_(9).numel())  # buffers at any time
        worker.do(end)
        assert worker.do(held) == bits(policy(7))


def test_the_blocks_of_a_worker_that_is_gone_are_free():
    scheme = scheme_of(zero_copy=True, workers=2)
    with running(scheme, method="fork") as (killed, other):
        scheme.send_async(policy(2))
        killed.do(receive)
        killed.process.kill()
        killed.process.join()
        other.do(receive)
        assert scheme.acknowledged == {0: 1, 1: 1}
        row, _ = scheme._sender.channel.board.rows
        assert row.held() == {FREE}


def test_a_worker_may_compute_with_parameters_that_point_at_a_snapshot():
    def forward_and_back(scheme, model):
        model(torch.ones(5, 3)).sum().backward()
        return model[0].weight.grad is not None

    scheme = scheme_of(zero_copy=True)
    with running(scheme) as (worker,):
        assert worker.do(forward_and_back)
        scheme.send_async(policy(2))
        assert worker.do(receive)
        assert worker.do(forward_and_back)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_slots_are_used_again_and_the_pool_stays_small(zero_copy):
    scheme = scheme_of(zero_copy=zero_copy, workers=3)
    with running(scheme) as workers:
        for value in range(2, 40):
            scheme.send_async(policy(value))
            for worker in workers[: value % 4]:
                assert worker.do(receive)
                assert worker.do(held) == bits(policy(value))
        slots = scheme._sender.channel.blocks
        assert slots.memory_bytes <= 6 * (slots.layout.nbytes + 4096)


def test_pointing_at_a_snapshot_needs_a_model_in_cpu_memory_and_both_sides_are_told():
    scheme = scheme_of(nn.Linear(2, 2), zero_copy=True, connect_timeout=60)
    says = "zero_copy=True: the model is on meta"
    with scheme, Worker(scheme, lambda: nn.Linear(2, 2, device="meta"), worker_idx=0) as worker:
        worker.tell(connect)
        with pytest.raises(WorkerRaised, match=says):
            scheme.connect()
        with pytest.raises(ValueError, match=says):
            worker.hear()
