"""Received memory is used again, and only what was lent and given back."""

from __future__ import annotations

import torch

from sync.remote.engine import give_back, lend_block

SIZE = 12_345  # that no other test receives


def test_what_was_given_back_is_lent_again_and_what_is_in_use_is_not():
    first, second = lend_block(SIZE), lend_block(SIZE)
    assert first.data_ptr() != second.data_ptr()
    give_back(first)
    assert lend_block(SIZE + 1) is not first
    assert lend_block(SIZE - 1) is not first
    assert lend_block(SIZE) is first
    assert lend_block(SIZE) is not first


def test_memory_of_others_is_never_lent():
    foreign = torch.empty(SIZE, dtype=torch.uint8)
    give_back(foreign)
    own = lend_block(SIZE)
    assert own is not foreign
    give_back(own)
    give_back(own)  # twice is once
    assert lend_block(SIZE) is own
    assert lend_block(SIZE) is not own


def test_only_a_few_are_kept():
    blocks = [lend_block(SIZE) for _ in range(20)]
    for block in blocks:
        give_back(block)
    again = [lend_block(SIZE) for _ in range(20)]
    assert sum(any(one is other for other in blocks) for one in again) == 4
