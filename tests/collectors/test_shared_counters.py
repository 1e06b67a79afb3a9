"""Counters shared by trainer and worker, read by one while the other writes."""

from __future__ import annotations

import pytest

from collectors.workers.shared_counters import FRAMES, SharedCounters


class Interleaved:
    """Words that another process changes just before the nth time that they are read."""

    def __init__(self, counters, nth: int, change):
        self._values, self._left, self._change = counters, nth, change

    def __getitem__(self, index):
        if self._left == 0:
            self._change()
        self._left -= 1
        return self._values[index]


@pytest.mark.parametrize("nth", range(3))
def test_a_block_that_is_begun_meanwhile_holds_none_of_the_frames_made_before(nth):
    counters = SharedCounters()
    counters.clear(0)
    counters.values[FRAMES] = 800
    mine = counters.values
    theirs = SharedCounters()
    theirs.values = mine
    counters.values = Interleaved(mine, nth, lambda: theirs.begin(0))
    assert counters.frames_in(0, 800) == 0


@pytest.mark.parametrize("nth", range(3))
def test_a_block_that_is_finished_meanwhile_holds_what_was_made(nth):
    counters = SharedCounters()
    counters.values[FRAMES] = 800
    counters.begin(0)
    mine = counters.values
    theirs = SharedCounters()
    theirs.values = mine
    counters.values[FRAMES] = 1000

    def finish() -> None:
        mine[FRAMES] = 1200
        theirs.finish(0)

    counters.values = Interleaved(mine, nth, finish)
    assert counters.frames_in(0, 1000) == 200
