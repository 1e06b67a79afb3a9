"""Callbacks: your own code, which a run calls at its stages.

    @callbacks.register("mean_reward", options=MeanRewardConfig)
    class MeanReward(Callback):
        def on_batch(self, run, batch):
            self.rewards.append(float(batch["next", "reward"].mean()))

        def on_log(self, run, metrics):
            metrics["mean_reward"] = sum(self.rewards) / len(self.rewards)

and `callbacks=[mean_reward]` on the command line. A callback that raises ends the run as failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from harness.errors import suggest

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class RunView(Protocol):
    """The attributes of the training loop that callbacks and loggers can use."""

    config: Any  # the whole config, harness.options.Config
    directory: Path  # of the run
    learner: Any  # its `policy` is what the workers get
    collector: Any  # of which `policy_version`, `made_batches()` and `worker_stages()` may be read
    sync: Any  # harness.measures.sync_meter.SyncMeter
    clock: Any  # harness.measures.clock.Clock
    staleness: Any  # harness.measures.staleness.Staleness
    frames: int  # collected so far
    updates: int  # done so far
    gradient_steps: int | None  # done so far; None if the algorithm does not report them

    def counts(self) -> dict[str, float]:
        """Frames by what became of them: `collector/collected` and so on."""


class Pruned(Exception):
    """Raised by a callback or a search: the run ends early, and that is no failure."""


class Callback:
    """Override what is needed; `options` are the fields of the registered options class."""

    def __init__(self, options: Any = None):
        self.options = options

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a hook that no run would call."""
        super().__init_subclass__(**options)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in hooks:
                raise TypeError(
                    f"{cls.__name__}.{name}: a run calls no such hook; {suggest(name, hooks)} "
                    "A method of your own needs another name, as without on_"
                )

    def on_run_start(self, run: RunView) -> None:
        """Everything is built; nothing is collected yet."""

    def on_batch(self, run: RunView, batch: TensorDictBase) -> None:
        """A batch was collected; the learner learns from it next."""

    def on_update(self, run: RunView, metrics: dict[str, float]) -> None:
        """The learner has learned from it; metrics may be added or changed."""

    def on_publish(self, run: RunView, version: int) -> None:
        """A version was published."""

    def on_batch_end(self, run: RunView) -> None:
        """The batch was learned from, published and logged; the run's state is whole."""

    def on_log(self, run: RunView, metrics: dict[str, float]) -> None:
        """A record is about to be logged; metrics may be added or changed."""

    def on_checkpoint(self, run: RunView, file: Path) -> None:
        """A checkpoint was written."""

    def on_run_end(self, run: RunView, summary: dict[str, Any]) -> None:
        """The run has ended, for whatever reason; the summary may be changed."""
