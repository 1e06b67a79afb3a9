"""The table of `benchmarks/pairing.py`."""

from __future__ import annotations

import pytest

from benchmarks.pairing import lines

pytestmark = pytest.mark.slow


def test_the_table_compares_paired_with_unpaired_deviations():
    """The schedules move both scores by the same amount, and each objective adds a little."""
    found = {
        "behaviour": {1: 10.0, 2: 20.0, 3: 30.0},
        "decoupled": {3: 42.0, 2: 30.0, 1: 21.0},
    }
    *_, row, median = lines(found)
    assert row == "| behaviour, decoupled | 3 | 1.0 | 14.5 | 7% | 100% |"
    assert median == "| median | | | | 7% | 100% |"


def test_too_few_seeds_in_common_are_an_error():
    found = {"behaviour": {1: 10.0, 2: 20.0, 3: 30.0}, "decoupled": {1: 1.0, 2: 2.0, 4: 3.0}}
    with pytest.raises(ValueError, match="behaviour and decoupled have 2 seeds in common"):
        list(lines(found))
