"""Lags of frames: how old the weights were that made them, in versions, updates and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from harness.measures.meters import Histogram, Ratios, Readings, Update
from harness.saved_state import Stateful
from lockstep_check.ages import age, in_training

MOST_TURNS = 10_000


class Lags(Stateful):
    """How many versions behind the learner the weights were that made the consumed frames."""

    STATE = ("all", "_fresh", "mixed_batches")

    def __init__(self) -> None:
        self.all: Counter[int] = Counter()
        self._fresh: Counter[int] = Counter()
        self.mixed_batches = 0

    def measure(self, update: Update) -> None:
        self.add(update.batch, update.version, update.ratios)

    def add(self, batch: TensorDictBase, version: int, ratios: Ratios | None = None) -> None:
        """Take in a batch that is consumed while `version` is the newest.

        ratios: of the frames that were learned from; without them, all frames of the batch count.
        """
        stamps = batch["policy_version"][batch["collector", "mask"]]
        self.add_stamps(stamps, version, None if ratios is None else ratios.version)

    def add_stamps(self, stamps: Tensor, version: int, used: Tensor | None = None) -> None:
        """The same of the versions of a batch's frames, and of the frames that were learned from.

        used: by default all.
        """
        self.mixed_batches += len(torch.unique(stamps[stamps >= 0])) > 1
        stamps = stamps if used is None else used
        used, counts = torch.unique(stamps[stamps >= 0], return_counts=True)
        for stamp, count in zip(used.tolist(), counts.tolist(), strict=True):
            self._fresh[age(stamp, version)] += count
            self.all[age(stamp, version)] += count

    def read(self) -> Readings:
        """Figures and histogram of the frames since the last reading."""
        lags, self._fresh = self._fresh, Counter()
        metrics = {"policy/mixed_batches": float(self.mixed_batches)}
        if not lags:
            return metrics
        return {**metrics, **lag_figures(lags), "histogram/lag": lag_histogram(lags)}

    def summary(self) -> dict[str, float]:
        """Figures of all frames."""
        figures = lag_figures(self.all) if self.all else {}
        return {**figures, "policy/mixed_batches": self.mixed_batches}


def lag_figures(lags: Mapping[int, int], name: str = "policy/lag") -> dict[str, float]:
    """Mean, 95th percentile and maximum of lags with their counts."""
    values = sorted(lags)
    counts = np.array([lags[lag] for lag in values])
    upto = np.cumsum(counts)
    return {
        f"{name}_mean": float(np.dot(values, counts) / upto[-1]),
        f"{name}_p95": float(values[int(np.searchsorted(upto, 0.95 * upto[-1]))]),
        f"{name}_max": float(values[-1]),
    }


def lag_histogram(lags: Mapping[int, int]) -> Histogram:
    """One bin for each lag."""
    least, most = min(lags), min(max(lags), min(lags) + 200)
    counts = [lags.get(lag, 0) for lag in range(least, most + 1)]
    counts[-1] += sum(count for lag, count in lags.items() if lag > most)
    return Histogram(counts, [lag - 0.5 for lag in range(least, most + 2)])


class Publications:
    """After how many updates, or gradient steps, each version was published.

    Only the points are kept at which the updates between two versions change: two of them, as long
    as `sync.interval` is the same. Versions before the oldest point count as that one.
    """

    def __init__(self) -> None:
        self._points = [(0, 0)]  # (version, updates or gradient steps)

    def note(self, version: int, moment: int) -> None:
        """Note that this version, which is newer than all before, was published."""
        if version <= self._points[-1][0]:
            return
        if len(self._points) > 1:
            before, last = self._points[-2:]
            if in_line(before, last, (version, moment)):
                self._points.pop()
        self._points = [*self._points[-MOST_TURNS + 1 :], (version, moment)]

    @property
    def newest(self) -> int:
        """The updates, or gradient steps, at the last publish."""
        return self._points[-1][1]

    def moments(self, versions: np.ndarray) -> np.ndarray:
        """The updates, or gradient steps, after which each of these versions was published."""
        points = np.array(self._points, np.float64)
        moments = np.interp(versions, points[:, 0], points[:, 1])
        return np.rint(moments).astype(np.int64)

    def state_dict(self) -> list[list[int]]:
        return [list(point) for point in self._points]

    def load_state_dict(self, state: list[list[int]]) -> None:
        self._points = [(int(version), int(moment)) for version, moment in state]


def in_line(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether the second of three points lies on the line between the others."""
    (x0, y0), (x1, y1), (x2, y2) = a, b, c
    return (y1 - y0) * (x2 - x1) == (y2 - y1) * (x1 - x0)


class LagCounts(Stateful):
    """How many frames had which lag, and what their lags are made of."""

    STATE = ("counts", "steps", "unpublished", "waited", "num_waited", "trained", "num_trained")

    def __init__(self) -> None:
        self.counts = np.zeros(1, np.int64)  # by lag
        self.steps: Counter[int] = Counter()  # frames by lag in gradient steps, if it is known
        self.unpublished = 0  # summed over frames
        self.waited = 0  # summed over frames
        self.num_waited = 0  # frames of which that is known
        self.trained = 0.0  # summed over frames
        self.num_trained = 0  # frames of which that is known

    def add(
        self,
        counts: np.ndarray,
        unpublished: int,
        gradient_steps: float | None,
        waited: int | None = None,
        steps: Mapping[int, int] | None = None,
    ) -> None:
        """Take in the frames of one update."""
        if missing := max(0, len(counts) - len(self.counts)):
            self.counts = np.pad(self.counts, (0, missing))
        self.counts[: len(counts)] += counts
        self.steps.update(steps or {})
        num_frames = int(counts.sum())
        self.unpublished += unpublished * num_frames
        if waited is not None:
            self.waited += waited * num_frames
            self.num_waited += num_frames
        if gradient_steps:
            self.trained += num_frames * in_training(gradient_steps) / gradient_steps
            self.num_trained += num_frames

    def figures(self) -> dict[str, float]:
        """The metrics; none without frames."""
        if not (lags := self.by_lag()):
            return {}
        metrics = lag_figures(lags, "policy/lag_updates")
        num_frames = int(self.counts.sum())
        publish = self.unpublished / num_frames
        queue = metrics["policy/lag_updates_mean"] - publish
        metrics |= {"policy/lag_publish_mean": publish, "policy/lag_queue_mean": queue}
        if self.num_waited == num_frames:
            wait = self.waited / num_frames
            metrics |= {"policy/lag_wait_mean": wait, "policy/lag_collect_mean": queue - wait}
        if self.num_trained:
            metrics["policy/lag_train_mean"] = self.trained / self.num_trained
        if self.steps.total() == num_frames:
            metrics |= lag_figures(self.steps, "policy/lag_steps")
        return metrics

    def by_lag(self) -> dict[int, int]:
        """The counts that are not zero."""
        (lags,) = self.counts.nonzero()
        return dict(zip(lags.tolist(), self.counts[lags].tolist(), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Earlier versions lack some.
        super().load_state_dict({"waited": 0, "num_waited": 0, "steps": {}} | state)
