"""The entries of a schedule: whose batch the learner takes next, with which versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class PlannedBatch(NamedTuple):
    """One batch of one worker.

    generation: how often the worker was replaced before.
    versions: pairs (step, version): from this step on, this is the newest version that the worker
        can take; -1 for random actions. The first pair is for step 0.
    lost: whether the learner never got it, since the worker failed over it, or soon after it.
    """

    worker: int
    generation: int
    versions: tuple[tuple[int, int], ...]
    lost: bool = False


class EndOfSchedule(Exception):
    """A recording has no more batches."""


class Schedule(Protocol):
    """Decides which worker is next. It knows published versions, but no frames."""

    exact: bool
    """Whether `versions` are those that acted; else those that had arrived, for `apply_at`."""

    @property
    def time_s(self) -> float:
        """The virtual time, in seconds."""

    def next_batch(self) -> PlannedBatch:
        """The batch that the learner takes now; `EndOfSchedule` if there is none."""

    def skip_update(self) -> None:
        """The learner did not learn from the batch taken last."""

    def publish(self, version: int, nbytes: int, workers: Sequence[int]) -> None:
        """The learner publishes a version to these workers."""

    def oldest_needed(self) -> int:
        """The oldest version that a later batch may need."""

    def counts(self) -> dict[str, int]:
        """Steps that workers have "collected", "dropped" (by failures) and "in_flight", and
        "restarts"."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
