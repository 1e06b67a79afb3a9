"""What a soak makes of its samples and records."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.soak import soak
from benchmarks.soak_figures import SLOPES, drift, figures, slope, speeds

pytestmark = pytest.mark.slow


def test_a_steady_rise_is_told_per_hour_and_is_not_flat():
    seconds = np.arange(600.0)
    found = slope(seconds, 100 + seconds / 360 + np.sin(seconds))
    assert found.value == pytest.approx(10, rel=0.02)
    assert found.low <= 10 <= found.high
    assert not found.is_flat


def test_noise_is_flat_and_has_an_interval():
    noise = np.random.default_rng(1).normal(size=600)
    found = slope(np.arange(600.0), 50 + noise)
    assert found.is_flat
    assert 0 < found.high - found.low < 10


def test_too_few_samples_say_nothing():
    assert slope([0.0, 1.0], [1.0, 9.0]).is_flat


def test_speeds_are_those_of_both_ends():
    times = np.arange(0.0, 601.0)
    steps = np.cumsum(np.where(times < 400, 100, 50))
    records = [{"time": t, "step": s} for t, s in zip(times, steps, strict=True)]
    assert speeds(records) == (pytest.approx(100), pytest.approx(50))


def test_drift_is_that_of_the_worst_record():
    def record(collected: int) -> dict[str, int]:
        counts = {"collected": collected, "delivered": 7, "dropped": 1, "in_flight": 2}
        return {f"collector/{name}": n for name, n in counts.items()}

    assert drift([record(10), {"eval/return": 3}]) == 0
    assert drift([record(10), record(13), record(9)]) == 3


@pytest.mark.timeout(600)
def test_a_short_soak_ends_well_and_adds_up():
    run = soak("ppo", minutes=0.2, restart_every_s=4.0)
    found = figures(run)
    assert (run.kills, run.status, run.state) == (2, 130, "interrupted")
    assert found["drift"] == 0
    assert set(found["slopes_per_hour"]) == set(SLOPES)
