"""Descriptors that go along with what is pickled."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from sync import passing
from sync.memory import AnonymousMemory, Doorbell, wait_for


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(5.0)
        other.settimeout(5.0)
        yield one, other


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def test_memory_and_bells_are_the_same_at_both_ends(ends):
    memory, bell = AnonymousMemory(100), Doorbell()
    passing.send(ends[0], {"memory": memory, "bell": bell, "again": memory, "word": "x" * 100_000})
    got = passing.receive(ends[1])
    assert got["memory"] is got["again"]
    assert got["memory"].fd != memory.fd
    assert got["word"] == "x" * 100_000
    memory.map(0, 4, writable=True)[:] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert got["memory"].map(0, 4, writable=False).tolist() == [1, 2, 3, 4]
    bell.ring()
    assert wait_for([got["bell"].fd], 5.0) == [got["bell"].fd]


def test_what_is_received_is_not_inherited_by_programs_that_are_started(ends):
    passing.send(ends[0], Doorbell())
    bell = passing.receive(ends[1])
    assert not os.get_inheritable(bell.fd)


def test_an_object_without_descriptors_passes_too(ends):
    passing.send(ends[0], [1, "two"])
    assert passing.receive(ends[1]) == [1, "two"]


@pytest.mark.parametrize("keep", [0, 5, 16, 40])
def test_what_breaks_off_is_an_oserror_and_leaves_no_descriptor(ends, keep):
    memory = AnonymousMemory(100)
    whole, rest = socket.socketpair()
    passing.send(whole, memory)
    data, fds, _, _ = socket.recv_fds(rest, 1 << 16, 8)
    if keep:
        socket.send_fds(ends[0], [data[:keep]], fds)
    ends[0].close()
    for fd in fds:
        os.close(fd)
    before = open_fds()
    with pytest.raises(OSError, match="ended"):
        passing.receive(ends[1])
    assert open_fds() == before
    whole.close()
    rest.close()


def test_an_object_that_cannot_be_read_leaves_no_descriptor(ends):
    class Odd:
        def __reduce__(self):
            return int, ("no number",)

    passing.send(ends[0], [AnonymousMemory(100), Doorbell(), Odd()])
    before = open_fds()
    with pytest.raises(ValueError, match="no number"):
        passing.receive(ends[1])
    assert open_fds() == before
