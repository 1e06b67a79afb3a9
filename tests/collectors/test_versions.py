"""Versions as an outer collector counts them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import torch

from collectors.weights.outer_versions import Chain


def test_stamps_get_the_outer_version_that_held_their_weights():
    versions, expected = Chain(), {0: 0}
    random = np.random.default_rng(0)
    inner = outer = 0
    for _ in range(500):
        before, inner = inner, inner + int(random.integers(0, 3))
        outer += int(random.integers(1, 3))
        expected |= dict.fromkeys(range(before + 1, inner), expected[before]) | {inner: outer}
        versions.note(inner, outer)
        assert versions.newest == outer
    stamps = torch.tensor([-1, *expected, inner + 5])
    assert versions.translate(stamps).tolist() == [-1, *expected.values(), outer]
    versions.note(inner + 3, outer + 9)
    after = torch.tensor([inner, inner + 2, inner + 3, inner + 7])
    assert versions.translate(after).tolist() == [outer, outer, outer + 9, outer + 9]


def test_most_notes_copy_no_older_versions():
    versions = Chain()
    versions.note(1_000_000, 7)
    tracemalloc.start()
    try:
        for further in range(1, 1000):
            versions.note(1_000_000 + further, 7 + further)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
