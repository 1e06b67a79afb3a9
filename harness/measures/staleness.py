"""How old the weights behind the consumed frames are, and what that does to them.

`lockstep_check/ages.py` defines ages and their parts. Here they are measured in updates and in
gradient steps, from the version that acted in each frame.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from harness.measures import BUCKETS
from harness.measures.lags import LagCounts, Publications, lag_histogram
from harness.measures.meters import Histogram, Ratios, Readings, Update
from harness.saved_state import Stateful
from lockstep_check.ages import Parts, age, parts

HIGHEST = (0, 1, 2, 4, 8, 16)  # lag of each bucket but the last
_HALF = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Of a histogram; its first and last bins hold what lies beyond them, too.
LOG_RATIO_EDGES = [*(-edge for edge in reversed(_HALF)), *_HALF]


class Health(Stateful):
    """Importance weights (current policy over acting weights) by bucket of lag.

    Kept as logarithms: sums of weights that overflow are still weighed against each other.
    """

    STATE = ("counts", "kl", "weight", "square", "largest")

    def __init__(self) -> None:
        shape = len(BUCKETS)
        self.counts, self.kl = np.zeros(shape), np.zeros(shape)
        # Logarithms of the sum of weights, of the sum of their squares, and of the largest.
        self.weight, self.square, self.largest = (np.full(shape, -np.inf) for _ in range(3))

    @classmethod
    def of(cls, log_ratio: np.ndarray, lags: np.ndarray) -> Health:
        """Of the frames of one update."""
        health, buckets = cls(), np.searchsorted(HIGHEST, lags)

        def sums(values: np.ndarray) -> np.ndarray:
            return np.bincount(buckets, values, len(BUCKETS))

        with np.errstate(all="ignore"):
            np.maximum.at(health.largest, buckets, log_ratio)
            scaled = np.exp(log_ratio - health.largest[buckets])
            health.counts = sums(np.ones(len(buckets)))
            health.kl = sums(np.expm1(log_ratio) - log_ratio)
            health.weight = health.largest + np.log(sums(scaled))
            health.square = 2 * health.largest + np.log(sums(scaled * scaled))
        return health

    def add(self, other: Health) -> None:
        """Take in the frames of another."""
        self.counts += other.counts
        self.kl += other.kl
        self.weight = np.logaddexp(self.weight, other.weight)
        self.square = np.logaddexp(self.square, other.square)
        self.largest = np.maximum(self.largest, other.largest)

    def figures(self) -> dict[str, float]:
        """The metrics of all frames, and of each bucket that has some."""
        metrics = {f"policy/{name}": value for name, value in self._of(slice(None)).items()}
        for place, bucket in enumerate(BUCKETS):
            of_bucket = self._of(slice(place, place + 1))
            metrics |= {f"policy/{name}/{bucket}": value for name, value in of_bucket.items()}
            if of_bucket:
                metrics[f"policy/share/{bucket}"] = float(self.counts[place] / self.counts.sum())
        return metrics

    def _of(self, buckets: slice) -> dict[str, float]:
        if not (count := self.counts[buckets].sum()):
            return {}
        with np.errstate(over="ignore", invalid="ignore"):
            weight, square = _log_sum(self.weight[buckets]), _log_sum(self.square[buckets])
            return {
                "ess": float(np.minimum(np.exp(2 * weight - square) / count, 1)),
                "kl": float(self.kl[buckets].sum() / count),
                "ratio_max": float(np.exp(self.largest[buckets].max())),
            }


def _log_sum(logarithms: np.ndarray) -> np.float64:
    return np.logaddexp.reduce(logarithms)


class Staleness(Stateful):
    """All measures of one run: since the last record, and over the whole run."""

    STATE = (
        "publications",
        "steps",
        "_fresh",
        "_all",
        "_fresh_health",
        "_all_health",
        "_log_ratios",
    )

    def __init__(self) -> None:
        self.publications = Publications()
        self.steps = Publications()  # in gradient steps
        self._fresh, self._all = LagCounts(), LagCounts()
        self._fresh_health, self._all_health = Health(), Health()
        self._log_ratios = _no_log_ratios()

    def measure(self, update: Update) -> None:
        self.add(
            update.used,
            update.updates,
            gradient_steps=update.metrics.get("train/gradient_steps"),
            ratios=update.ratios,
            newest_at_end=update.newest_at_end,
            steps=update.gradient_steps,
        )

    def add(
        self,
        versions: Tensor,
        updates: int,
        *,
        gradient_steps: float | None = None,
        ratios: Ratios | None = None,
        newest_at_end: int | None = None,
        steps: int | None = None,
    ) -> None:
        """Take in what one update used, as the learner had done `updates` before it.

        versions: behind each frame; negative ones are of random actions and do not count.
        newest_at_end: the newest version when the batch was finished.
        steps: gradient steps that the learner had done before it, if they are known.
        """
        acted = versions[versions >= 0].cpu().numpy()
        if len(acted):
            ages = self._parts(acted, updates, newest_at_end)
            counts = np.bincount(ages.total)
            in_steps = None
            if steps is not None:
                lags, frames = np.unique(age(self.steps.moments(acted), steps), return_counts=True)
                in_steps = dict(zip(lags.tolist(), frames.tolist(), strict=True))
            waited = None if newest_at_end is None else int(ages.wait)
            for window in (self._fresh, self._all):
                window.add(counts, int(ages.publish), gradient_steps, waited, in_steps)
        if ratios is not None and len(ratios.version):
            log_ratio = ratios.log_ratio.detach().cpu().double().numpy()
            health = Health.of(log_ratio, self._parts(ratios.version.cpu().numpy(), updates).total)
            self._fresh_health.add(health)
            self._all_health.add(health)
            bins = np.searchsorted(LOG_RATIO_EDGES[1:-1], log_ratio)
            self._log_ratios += np.bincount(bins, minlength=len(self._log_ratios))

    def note(self, version: int, updates: int, steps: int) -> None:
        """Note that a version was published after so many updates and gradient steps."""
        self.publications.note(version, updates)
        self.steps.note(version, steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"steps": [[0, 0]]} | state)  # earlier versions lack them

    def _parts(self, acted: np.ndarray, updates: int, made: int | None = None) -> Parts:
        """The ages of frames in updates. made: the newest version at the end of their batch."""
        taken = self.publications.newest
        at_end = taken if made is None else int(self.publications.moments(np.array(made)))
        return parts(self.publications.moments(acted), at_end, taken, updates)

    def read(self) -> Readings:
        """Metrics and histograms since the last reading."""
        readings: dict[str, float | Histogram] = {
            **self._fresh.figures(),
            **self._fresh_health.figures(),
        }
        if lags := self._fresh.by_lag():
            readings["histogram/lag_updates"] = lag_histogram(lags)
        if self._log_ratios.any():
            ratios = Histogram(self._log_ratios.tolist(), LOG_RATIO_EDGES)
            readings["histogram/log_ratio"] = ratios
        self._fresh, self._fresh_health = LagCounts(), Health()
        self._log_ratios = _no_log_ratios()
        return readings

    def summary(self) -> dict[str, float]:
        """The metrics of the whole run."""
        return self._all.figures() | self._all_health.figures()


def _no_log_ratios() -> np.ndarray:
    return np.zeros(len(LOG_RATIO_EDGES) - 1, np.int64)


class StateAge(Stateful):
    """How old the state of a recurrent policy is: what part of it older weights have computed.

    Of each frame, the versions since its episode began, and with it its state.

    carried: whether the state is kept when new weights arrive; else they compute it anew, and it
        has no age.
    """

    STATE = ("_recent", "_all")

    def __init__(self, *, carried: bool):
        self.carried = carried
        self._begun: dict[int, int] = {}  # unfinished trajectories, and the version of their start
        self._recent, self._all = Ages(), Ages()

    def measure(self, update: Update) -> None:
        self.add(update.batch)

    def add(self, batch: TensorDictBase) -> None:
        """Take in the frames of a batch."""
        ids, versions, mask = (
            batch[key].cpu().numpy()
            for key in (("collector", "traj_ids"), "policy_version", ("collector", "mask"))
        )
        acted = mask & (versions >= 0)
        unique, first, place = np.unique(ids[acted], return_index=True, return_inverse=True)
        used = versions[acted]
        starts = [self._begun.get(int(i), v) for i, v in zip(unique, used[first], strict=True)]
        begun_by = np.array(starts, np.int64)[place] if self.carried else used
        ages = age(begun_by, used)
        for window in (self._recent, self._all):
            window.add(ages)
        begun = dict(zip(unique.tolist(), starts, strict=True))
        self._begun |= {int(i): int(version) for i, version in begun.items()}
        for ended in ids[mask & batch["next", "done"].cpu().numpy()].tolist():
            self._begun.pop(ended, None)

    def read(self) -> dict[str, float]:
        """The figures since the last reading."""
        recent, self._recent = self._recent, Ages()
        return recent.figures()

    def summary(self) -> dict[str, float]:
        """Those of the whole run."""
        return self._all.figures()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "begun": [list(pair) for pair in self._begun.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._begun = {int(traj): int(version) for traj, version in state["begun"]}


class Ages(Stateful):
    """The mean and the largest of many ages."""

    STATE = ("total", "count", "largest")

    def __init__(self) -> None:
        self.total = self.count = self.largest = 0

    def add(self, ages: np.ndarray) -> None:
        """Take in the ages of some frames."""
        self.total += int(ages.sum())
        self.count += len(ages)
        self.largest = max(self.largest, int(ages.max(initial=0)))

    def figures(self) -> dict[str, float]:
        """The metrics; none without frames."""
        if not self.count:
            return {}
        mean = self.total / self.count
        return {"policy/state_age_mean": mean, "policy/state_age_max": float(self.largest)}
