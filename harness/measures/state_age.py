"""How old the state of a recurrent policy is: what part of it older weights have computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDictBase


class StateAge:
    """Of each frame, how many versions passed since its episode began, with which its state did.

    carried: whether the state is kept when new weights arrive; else they compute it anew, and it
        has no age.
    """

    def __init__(self, *, carried: bool):
        self.carried = carried
        self._begun: dict[int, int] = {}  # unfinished trajectories, and the version of their start
        self._recent, self._all = Ages(), Ages()

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
        ages = used - np.array(starts, np.int64)[place] if self.carried else np.zeros_like(used)
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
        return {
            "begun": [list(pair) for pair in self._begun.items()],
            "recent": vars(self._recent).copy(),
            "all": vars(self._all).copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begun = {int(traj): int(version) for traj, version in state["begun"]}
        self._recent, self._all = Ages(**state["recent"]), Ages(**state["all"])


class Ages:
    """The mean and the largest of many ages."""

    def __init__(self, total: int = 0, count: int = 0, largest: int = 0):
        self.total, self.count, self.largest = int(total), int(count), int(largest)

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
