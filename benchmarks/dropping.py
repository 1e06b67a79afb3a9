"""What is left out because it is too old, by the length of its episode.

`experiment=dropping` names this module as a plugin. Its callback follows each episode over batches
and adds to each record, of the episodes that have ended since the one before:

    episodes/length          mean length
    episodes/length_used     the same, each weighted by the share of its frames that were used

If long episodes are left out more often than short ones, the second is the smaller.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from harness.callbacks import Callback
from harness.options.base import Options
from harness.registry import callbacks
from lockstep_check.ages import is_within


@callbacks.register("used_episodes", options=Options)
class UsedEpisodes(Callback):
    """Counts the frames of each episode, and those that are not too old to be used."""

    def __init__(self, options: Any = None):
        super().__init__(options)
        self.frames: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # made, used: by trajectory
        self.ended: list[tuple[int, int]] = []

    def on_batch(self, run: Any, batch: Any) -> None:
        most, newest = run.config.sync.max_lag, run.collector.policy_version
        numbers, mask = batch["collector", "traj_ids"], batch["collector", "mask"]
        used = mask if most is None else mask & is_within(batch["policy_version"], newest, most)
        done = batch["next", "done"] & mask
        for row in range(len(numbers)):
            for number in numbers[row][mask[row]].unique().tolist():
                here = numbers[row] == number
                counts = self.frames[number]
                counts[0] += int((here & mask[row]).sum())
                counts[1] += int((here & used[row]).sum())
                if bool((here & done[row]).any()):
                    made, of_use = self.frames.pop(number)
                    self.ended.append((made, of_use))

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        if not self.ended:
            return
        weight = sum(used / made for made, used in self.ended)
        metrics["episodes/length"] = sum(made for made, _ in self.ended) / len(self.ended)
        if weight:
            metrics["episodes/length_used"] = sum(used for _, used in self.ended) / weight
        self.ended.clear()
