"""Memory that comes back, and only once nobody looks into it."""

from __future__ import annotations

import os

import torch

from sync.remote.recycled import LEAST_BYTES, Recycled

MANY = 4 * LEAST_BYTES


def test_memory_that_nobody_looks_into_is_given_out_again():
    memory = Recycled()
    first = memory.take(MANY)
    assert (first.numel(), first.dtype) == (MANY, torch.uint8)
    where = first.data_ptr()
    del first
    assert memory.take(MANY).data_ptr() == where


def test_memory_that_a_view_looks_into_is_not():
    memory = Recycled()
    whole = memory.take(MANY)
    part = whole[LEAST_BYTES:].view(torch.float32)
    part.fill_(7.0)
    del whole
    others = [memory.take(MANY).fill_(0) for _ in range(4)]
    assert part.eq(7.0).all()
    assert len({other.data_ptr() for other in others}) == 4


def test_of_another_size_nothing_is_kept():
    memory = Recycled()
    del_me = [memory.take(MANY) for _ in range(2)]
    del del_me
    wanted = memory.take(2 * MANY)
    assert wanted.numel() == 2 * MANY
    assert not memory._free


def test_it_can_be_trained_on_and_written_wherever_it_was_made():
    memory = Recycled()
    with torch.inference_mode():
        block = memory.take(MANY)
    parameter = torch.nn.Parameter(block.view(torch.float32).fill_(1.0))
    parameter.sum().backward()
    assert parameter.grad.eq(1.0).all()


def test_a_forked_child_that_writes_does_not_write_here():
    memory = Recycled()
    block = memory.take(MANY).fill_(1)
    if (child := os.fork()) == 0:
        block.numpy()[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert block.eq(1).all()
