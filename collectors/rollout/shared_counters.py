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
NUM_COUNTERS = 6
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
        self.memory = AnonymousMemory(8 * NUM_COUNTERS)
        self._map()

    def _map(self) -> None:
        self.values = as_bytes(self.memory.map(0, self.memory.nbytes, writable=True)).cast("q")

    @property
    def stage(self) -> str:
        return STAGES[self.values[STAGE]]

    def __getstate__(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()
