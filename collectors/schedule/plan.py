"""The entries of a schedule: whose batch the learner takes next, with which versions."""

from __future__ import annotations

from typing import NamedTuple


class PlannedBatch(NamedTuple):
    """One batch of one worker.

    generation: how often the worker was replaced before.
    versions: pairs (step, version): from this step on, this is the newest version that the worker
        can take; -1 for random actions. The first pair is for step 0.
    lost: whether the learner never got it, since the worker failed over it, or soon after it.
    steps_before: how many steps the worker made in earlier generations; only for random frames at
        first, of which a recording itself says how many are left.
    """

    worker: int
    generation: int
    versions: tuple[tuple[int, int], ...]
    lost: bool = False
    steps_before: int = 0


class EndOfSchedule(Exception):
    """A recording has no more batches."""
