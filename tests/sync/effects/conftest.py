"""A clock for slow links that tests move by hand."""

from __future__ import annotations

import pytest


class Clock:
    """Time that passes when the test says so, in nanoseconds."""

    def __init__(self):
        self.now = 10**12

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("sync.effects.slow_link.now_ns", clock)
    return clock
