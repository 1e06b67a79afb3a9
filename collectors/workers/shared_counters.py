"""Counters that the trainer and one worker share: 64-bit numbers, each with one writer.

They hold what changes too often for messages: how many frames a worker has made, what it is doing,
and whether there is a message for it to read.
"""

from __future__ import annotations

from typing import Any

from sync.local.memory import AnonymousMemory, as_bytes

# Written by the worker.
FRAMES, STEPS, STAGE, VERSION = range(4)
# Written by the trainer.
MESSAGES, CUT = 4, 5
# Written by the worker, two for each block: frame counts when it was begun and when it was full.
_RANGES = 8
MAX_BLOCKS = 64
OPEN = -1

STAGES = (
    "starting",
    "idle",
    "resetting",
    "acting",
    "stepping",
    "taking weights",
    "handing over",
    "replaying episodes",
    "compiling",
)
STARTING, IDLE, RESETTING, ACTING, STEPPING, TAKING_WEIGHTS, HANDING_OVER = range(7)
REPLAYING, COMPILING = 7, 8


class SharedCounters:
    """The counters of one worker: `counters.values[FRAMES]` and so on."""

    def __init__(self) -> None:
        self.memory = AnonymousMemory((_RANGES + 2 * MAX_BLOCKS) * 8)
        self._map()

    def _map(self) -> None:
        self.values = as_bytes(self.memory.map(0, self.memory.nbytes, writable=True)).cast("q")

    @property
    def stage(self) -> str:
        return STAGES[self.values[STAGE]]

    def begin(self, block: int) -> None:
        """The worker: from here on frames go into this block."""
        self.values[_RANGES + 2 * block] = self.values[
            FRAMES
        ]  # first, or it would be OPEN from 0 on
        self.values[_RANGES + 2 * block + 1] = OPEN

    def finish(self, block: int) -> int:
        """The worker: the block is full; the number of its frames."""
        self.values[_RANGES + 2 * block + 1] = self.values[FRAMES]
        return self.values[FRAMES] - self.values[_RANGES + 2 * block]

    def frames_in(self, block: int, frames: int) -> int:
        """The trainer: how many frames lie in the block, when the worker has made `frames`."""
        end = self.values[
            _RANGES + 2 * block + 1
        ]  # first: where it is OPEN, its beginning is written
        begun = self.values[_RANGES + 2 * block]
        return max(0, (frames if end == OPEN else min(end, frames)) - begun)

    def clear(self, block: int) -> None:
        """The trainer, whose the full block now is: nothing in it is in flight any more."""
        self.values[_RANGES + 2 * block] = self.values[_RANGES + 2 * block + 1] = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()
