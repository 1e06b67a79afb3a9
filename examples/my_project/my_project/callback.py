"""A callback: the mean reward since the last record, in each record and in a file of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.callbacks import Callback, RunView
from harness.options import Options
from harness.registry import callbacks

if TYPE_CHECKING:
    from tensordict import TensorDictBase


@dataclass
class MeanRewardConfig(Options):
    """Adds my_project/mean_reward to each record, and writes the figures to a CSV file."""

    group = "callbacks.mean_reward"

    file: str = "mean_reward.csv"  # in the run directory


@callbacks.register("mean_reward", options=MeanRewardConfig)
class MeanReward(Callback):
    """Sums rewards batch by batch, and reports their mean per frame."""

    def __init__(self, options: MeanRewardConfig):
        super().__init__(options)
        self.total, self.frames = 0.0, 0
        self.rows: list[tuple[int, float]] = []

    def on_batch(self, run: RunView, batch: TensorDictBase) -> None:
        rewards = batch["next", "reward"][batch["collector", "mask"]]
        self.total += float(rewards.sum())
        self.frames += rewards.numel()

    def on_log(self, run: RunView, metrics: dict[str, float]) -> None:
        if not self.frames:
            return
        mean = metrics["my_project/mean_reward"] = self.total / self.frames
        self.rows.append((run.frames, mean))
        self.total, self.frames = 0.0, 0

    def on_run_end(self, run: RunView, summary: dict[str, Any]) -> None:
        lines = ["frames,mean_reward", *(f"{frames},{mean}" for frames, mean in self.rows)]
        (run.directory / self.options.file).write_text("\n".join(lines) + "\n")
