"""The words between trainer and worker, read by one while the other writes."""

from __future__ import annotations

import pytest

from collectors.words import FRAMES, Words


class Interleaved:
    """Words that another process changes just before the nth time that they are read."""

    def __init__(self, words, nth: int, change):
        self._words, self._left, self._change = words, nth, change

    def __getitem__(self, index):
        if self._left == 0:
            self._change()
        self._left -= 1
        return self._words[index]


@pytest.mark.parametrize("nth", range(3))
def test_a_block_that_is_begun_meanwhile_holds_none_of_the_frames_made_before(nth):
    words = Words()
    words.clear(0)
    words.words[FRAMES] = 800
    mine = words.words
    theirs = Words()
    theirs.words = mine
    words.words = Interleaved(mine, nth, lambda: theirs.begin(0))
    assert words.frames_in(0, 800) == 0


@pytest.mark.parametrize("nth", range(3))
def test_a_block_that_is_finished_meanwhile_holds_what_was_made(nth):
    words = Words()
    words.words[FRAMES] = 800
    words.begin(0)
    mine = words.words
    theirs = Words()
    theirs.words = mine
    words.words[FRAMES] = 1000

    def finish() -> None:
        mine[FRAMES] = 1200
        theirs.finish(0)

    words.words = Interleaved(mine, nth, finish)
    assert words.frames_in(0, 1000) == 200
