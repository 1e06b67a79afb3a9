"""What a run measures, the names that its metrics are made of, and their means.

This is for those who read metrics, too, and imports neither torch nor sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PHASES = ("collect", "train", "sync", "log")  # of the learner's loop
BUCKETS = {  # of lags, as metrics name them and as a reader sees them
    "lag_0": "0",
    "lag_1": "1",
    "lag_2": "2",
    "lag_3_4": "3–4",
    "lag_5_8": "5–8",
    "lag_9_16": "9–16",
    "lag_17_up": "17+",
}

MUCH = 0.1  # share of unused frames from which on a run says so


@dataclass(frozen=True)
class Unused:
    """Frames that workers made and the learner did not learn from."""

    refused: int  # by the learner: too old for `max_lag`, or of random actions
    lost: int  # by the collector, for instance with a worker that died
    total: int  # these and all that were learned from

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Unused:
        """Of a run's summary, or of a record of it."""
        refused, lost, delivered = (
            int(metrics.get(name) or 0)
            for name in ("policy/dropped", "collector/dropped", "collector/delivered")
        )
        return cls(refused, lost, delivered + lost)

    @property
    def count(self) -> int:
        return self.refused + self.lost

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.count / self.total if self.total else 0.0

    @property
    def is_much(self) -> bool:
        """Whether it is more than a tenth."""
        return self.share > MUCH

    def __str__(self) -> str:
        return f"{self.count:,} ({self.share:.0%})"


class Means:
    """Adds up numbers and one-element tensors by name.

    Tensors are only converted to numbers in `read`, so `add` never waits for a GPU.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float | Tensor] = {}
        self._counts: Counter[str] = Counter()

    def add(self, measured: Mapping[str, float | Tensor]) -> None:
        """Take in one value for each name."""
        for name, value in measured.items():
            value = value if isinstance(value, int | float) else value.detach()
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] += 1

    def read(self) -> dict[str, float]:
        """The means since the last reading."""
        sums, counts = self._sums, self._counts
        self._sums, self._counts = {}, Counter()
        return {name: float(total) / counts[name] for name, total in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        sums = {name: float(total) for name, total in self._sums.items()}
        return {"sums": sums, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._counts = dict(state["sums"]), Counter(state["counts"])
