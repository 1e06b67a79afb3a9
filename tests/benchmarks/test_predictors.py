from __future__ import annotations

import pytest

from benchmarks.predictors import Point, damages, lines

pytestmark = pytest.mark.slow

FRESH = (0.0, 0.0, 0.0)


def test_damage_is_the_share_of_the_tasks_largest_loss():
    found = [
        Point("a", "x", 0, 100, FRESH),
        Point("a", "x", 8, 60, (8, 0.1, 0.1)),
        Point("a", "y", 0, 90, FRESH),
        Point("a", "y", 8, 10, (8, 0.2, 0.1)),
        Point("b", "x", 0, 5, FRESH),
        Point("b", "x", 8, 4, (8, 0.1, 0.1)),
    ]
    assert damages(found) == [0, 0.5, 0, 1, 0, 1]


def test_the_table_has_the_rank_correlation_of_damage_with_each_measure():
    found = [
        Point("a", "x", 0, 100, FRESH),
        Point("a", "x", 1, 90, (1, 0.3, 0.1)),
        Point("a", "x", 2, 80, (2, 0.2, 0.2)),
        Point("a", "x", 4, 70, (4, 0.1, 0.4)),
    ]
    assert list(lines(found))[2:] == [
        "| a | 3 | 1.00 | -1.00 | 1.00 |",
        "| all | 3 | 1.00 | -1.00 | 1.00 |",
    ]


def test_without_a_run_at_lag_0_there_is_nothing_to_compare_with():
    with pytest.raises(ValueError, match=r"no run at lag 0 for \[\('a', 'x'\)\]"):
        damages([Point("a", "x", 8, 60, FRESH)])
