"""Somebody else's shared memory, seen without the right to write to it."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import multiprocessing
import signal
import weakref
from pathlib import Path

import numpy as np
import torch

from sync.remote.read_only import read_only

NBYTES = 3 * mmap.PAGESIZE


class Array(np.ndarray):
    """One of which there can be weak references that views of it do not share."""


def shared() -> np.ndarray:
    """Bytes that neither begin nor end with a page."""
    whole = np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8)
    whole[:] = np.arange(NBYTES) % 251
    return whole[100 : NBYTES - 200]


def mappings() -> int:
    """How many there are of shared memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[1].endswith("s") for line in lines)


def write(seen: torch.Tensor) -> None:
    faulthandler.disable()  # or it says how it ended
    seen.fill_(1)


def test_the_same_bytes_are_seen_twice():
    theirs = shared()
    mine = read_only(theirs)
    assert (mine == theirs).all()
    theirs[7] = 250
    assert torch.from_numpy(mine)[7] == 250


def test_who_writes_to_it_ends_and_the_owner_may_write():
    theirs = shared()
    mine = torch.from_numpy(read_only(theirs))
    writer = multiprocessing.get_context("fork").Process(target=write, args=(mine,))
    writer.start()
    writer.join(30.0)
    assert writer.exitcode == -signal.SIGSEGV
    assert theirs[1] == 101
    theirs[1] = 5
    assert mine[1] == 5


def test_it_keeps_what_it_shows_and_its_pages_go_with_it():
    gc.collect()
    before = mappings()
    theirs = shared().view(Array)
    kept = weakref.ref(theirs)
    seen = torch.from_numpy(read_only(theirs))[10:20]
    del theirs
    gc.collect()
    assert kept() is not None
    assert seen.tolist() == list(range(110, 120))
    del seen
    gc.collect()
    assert kept() is None
    assert mappings() == before


def test_memory_of_this_process_alone_is_not_mapped_twice():
    assert read_only(np.zeros(NBYTES, np.uint8)) is None
    assert read_only(np.zeros(0, np.uint8)) is None
