"""What a meter is: it takes in each update of a run, and is read for each record and at the end.

    class Rewards(Stateful):
        STATE = ("sum",)
        def measure(self, update: Update) -> None: ...
        def read(self) -> Readings: ...
        def summary(self) -> dict[str, Any]: ...

To add one, list it in `TrainingLoop.__post_init__`. Its name there is its name in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from harness.measures import Means

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch import Tensor

NUM_BINS = 30


@dataclass
class Histogram:
    """How often values fell between consecutive edges; one more edge than counts."""

    counts: list[int]
    edges: list[float]

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Histogram:
        """Of raw values, of which there must be one."""
        counts, edges = np.histogram(np.asarray(values, dtype=np.float64), bins=NUM_BINS)
        return cls(counts.tolist(), edges.tolist())


Readings = Mapping[str, float | Histogram]


class Ratios(NamedTuple):
    """How far the policy is from the weights that acted, for each frame [N] of an update."""

    log_ratio: Tensor  # log-probability of the action: by the policy before the update, less theirs
    version: Tensor  # of the weights that acted


class Update(NamedTuple):
    """One batch that the learner has taken in, and what it did with it."""

    batch: TensorDictBase
    metrics: dict[str, float]  # of the algorithm
    version: int  # the newest that was published before
    used: Tensor  # the versions behind the frames that were learned from
    ratios: Ratios | None  # of these frames, if they are known
    updates: int  # done before
    gradient_steps: int | None  # done before, if they are known
    newest_at_end: int | None  # the newest version when the batch was finished, if it is known


class Meter(Protocol):
    """Measures something of each update."""

    def measure(self, update: Update) -> None:
        """Take in an update, before the new weights are published."""

    def read(self) -> Readings:
        """Numbers and histograms since the last reading, by the names of their metrics."""

    def summary(self) -> dict[str, Any]:
        """Those of the whole run."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trained:
    """What the algorithm reports of its updates, as means."""

    def __init__(self) -> None:
        self._means = Means()

    def measure(self, update: Update) -> None:
        self._means.add(update.metrics)

    def read(self) -> Readings:
        return self._means.read()

    def summary(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return self._means.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means.load_state_dict(state)


def split(readings: Readings) -> tuple[dict[str, float], dict[str, Histogram]]:
    """The numbers, and the histograms."""
    histograms = {name: x for name, x in readings.items() if isinstance(x, Histogram)}
    numbers = {name: x for name, x in readings.items() if not isinstance(x, Histogram)}
    return numbers, histograms
