"""The loop of a run: collect, update, publish, log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from collectors import BaseCollector, SimulatedCollector
from collectors.rollout.seeds import Streams
from collectors.schedule.recording import EndOfSchedule
from harness.algorithms.interface import Learner
from harness.callbacks import Callback
from harness.logging import Loggers
from harness.logging.display import Display
from harness.measures.clock import Clock, system_metrics
from harness.measures.episodes import Episodes
from harness.measures.lags import Lags
from harness.measures.meters import Histogram, Meter, Trained, Update, split
from harness.measures.staleness import Staleness, StateAge
from harness.measures.sync_meter import SyncMeter
from harness.options.run import Config
from harness.run.background_batches import BackgroundBatches, Following
from harness.run.checkpoints import Checkpoints
from harness.run.published_weights import PublishedWeights
from harness.run.signals import Interruption

log = logging.getLogger(__name__)

MOST_REFUSED = 10  # batches of each worker, after which a run that learns from none is ended

Evaluate = Callable[[], dict[str, float]]


class RunPosition(NamedTuple):
    """How far a run is, its records and its evaluations."""

    frames: int
    logged_at: int
    evaluated_at: int


@dataclass(eq=False, kw_only=True)
class TrainingLoop:
    """Owns the loop and its counters; all parts are passed in."""

    config: Config
    directory: Path
    learner: Learner
    collector: BaseCollector
    sync: SyncMeter
    published: PublishedWeights
    play: Evaluate
    checkpoints: Checkpoints
    loggers: Loggers
    display: Display
    interruption: Interruption
    callbacks: list[Callback]
    free_running: BackgroundBatches | None = None  # if the collector fills the replay buffer

    def __post_init__(self) -> None:
        self.frames = 0
        self.updates = 0
        self.gradient_steps: int | None = 0  # None: the algorithm does not report them
        self.dropped = 0  # frames that the learner would not take, for their lag
        self.overwritten = 0  # frames that it did not see
        self.clock = Clock(self.loggers.phase)
        self.episodes = Episodes()
        self.staleness = Staleness()
        self.meters: dict[str, Meter] = {
            "trained": Trained(),
            "episodes": self.episodes,
            "sync": self.sync,
            "lags": Lags(),
            "staleness": self.staleness,
        }
        if self.config.model.recurrent:
            self.meters["state_age"] = StateAge(carried=self.config.sync.state_on_update == "keep")
        self._refused = 0  # batches in a row of which nothing was learned
        self._evaluated: dict[str, float] = {}  # not in a record yet
        self._last_evaluation: dict[str, float] = {}
        self._counted_before: dict[str, float] = {}  # by the runs that this one goes on from
        # The frames at which each of these was last done.
        self._logged_at = self._evaluated_at = 0
        self._evaluated_after = 0  # updates
        self._saved = self._progress()
        self._started_at = 0
        self._timed_from = 0  # frames before have no time: a checkpoint did not have it

    def run(self) -> None:
        """Until all frames are collected, or a signal asks for the end."""
        self._started_at = self.frames
        with self.interruption.whole():
            self.loggers.start(self)
            self.call("on_run_start")
            # What was due when the run that this one goes on from was ended.
            self.evaluate_if_due()
            self.log_if_due()
            self.checkpoint_if_due()
            self.interruption.check()
            while self.frames < self.config.total_frames:
                batch = self.collect()
                if batch is None:
                    break
                if self.update(batch):
                    self.publish()
                self.evaluate_if_due()
                self.log_if_due()
                self.checkpoint_if_due()
                self.interruption.check()  # the run's state is whole here
                self.call("on_batch_end")
            if self.config.evaluation.at_end and self._evaluated_at < self.frames:
                if self.config.checkpoint.at_end:
                    self.save()  # what was trained outlives an error in the evaluation
                self.evaluate()
            if self.frames > self._logged_at:
                self._record()
            elif self._evaluated:
                self.call("on_log", self._evaluated)
                self.loggers.log(self.frames, self._evaluated)
                self._evaluated = {}

    def call(self, hook: str, *arguments: Any) -> None:
        """Call one hook of each callback, with this run."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)

    # -- the four steps

    def collect(self) -> TensorDictBase | None:
        """The next batch; None if there will be no more."""
        with self.clock.phase("collect"):
            if self.free_running is not None:
                following = self.free_running.next(self.frames)
            else:
                following = self._next_in_turn()
        if following is None:
            return None
        batch, self.frames, overwritten = following
        self.overwritten += overwritten
        self.learner.add_overwritten(overwritten)
        self.call("on_batch", batch)
        return batch

    def _next_in_turn(self) -> Following | None:
        """The collector's next batch."""
        try:
            batch = self.collector.next()
        except EndOfSchedule as end:
            log.warning("%s: the run ends here, before total_frames", end)
            return None
        return Following(batch, self.frames + int(batch["collector", "mask"].sum()), 0)

    def update(self, batch: TensorDictBase) -> bool:
        """Update the policy with the batch. Whether it learned.

        It did not if it dropped all frames, or if they only went into a replay buffer.
        """
        version = int(self.collector.policy_version)
        with self.clock.phase("train", "update"):
            metrics = self.learner.learn(batch, version)
        update = Update(
            batch,
            metrics,
            version=version,
            used=self.learner.versions(batch),
            ratios=self.learner.ratios,
            updates=self.updates,
            gradient_steps=self.gradient_steps,
            newest_at_end=None if self.config.algo.replays else self.collector.newest_at_end,
        )
        self.call("on_update", metrics)
        with self.clock.phase("log"):
            for meter in self.meters.values():
                meter.measure(update)
        dropped = int(metrics.get("train/dropped", 0))
        self.dropped += dropped
        num_steps = metrics.get("train/gradient_steps", 0.0 if self.config.algo.replays else None)
        if self.gradient_steps is not None:
            self.gradient_steps = (
                None if num_steps is None else self.gradient_steps + int(num_steps)
            )
        only_replays = self.config.algo.replays and not num_steps
        if only_replays or (dropped and num_steps == 0):
            self.collector.skip_update()
            self._refused += not only_replays
            self._check_refused()
            return False
        self._refused = 0
        self.updates += 1
        return True

    def _check_refused(self) -> None:
        """End a run that would never learn again.

        Without updates nothing is published, so that an exact lag, say, stays where it is. Batches
        that were made before the last update are old and followed by newer ones, so each worker has
        several.
        """
        config: Any = self.config
        rounds = config.collector.workers // config.collector.workers_of_a_batch
        if self._refused < MOST_REFUSED * rounds or config.sync.apply_at == "episode":
            return
        raise RuntimeError(
            f"nothing was learned from the last {self._refused} batches: all of their frames lag "
            f"more than algo.max_lag={config.algo.max_lag}. Without an update no newer weights are "
            "published, so that this run would never learn again; allow a larger sync.max_lag"
        )

    def publish(self) -> None:
        """Publish the weights to the workers."""
        if self.updates % self.config.sync.interval:
            return
        with self.clock.phase("sync", "publish"), self.sync.publishing():
            self.collector.update_policy_weights_()
        self.published.add()
        self.call("on_publish", int(self.collector.policy_version))
        version = int(self.collector.policy_version)
        self.staleness.note(version, self.updates, self.gradient_steps or 0)

    # -- now and then

    def log_if_due(self) -> None:
        """Write a record: of every evaluation, too, at its own frames."""
        if self._evaluated or self.frames - self._logged_at >= self.config.log_every_frames:
            with self.clock.phase("log"):
                self._record()

    def _record(self) -> None:
        metrics, histograms = self._read()
        self.call("on_log", metrics)
        self.loggers.log(self.frames, metrics, histograms)
        self.display.update(
            self.frames, metrics, episode_return=self.episodes.mean_return, updates=self.updates
        )
        self._logged_at = self.frames

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint if there was none for `checkpoint.every_frames`."""
        if passed(self.config.checkpoint.every_frames, self._saved.frames, self.frames):
            self.save()

    def evaluate_if_due(self) -> None:
        """Evaluate; if that ends the run, a record is written of what was measured."""
        if not self._evaluation_is_due():
            return
        try:
            self.evaluate()
        except Exception:  # a search that has seen enough, say
            self._record()
            raise

    def _evaluation_is_due(self) -> bool:
        """Whether one of the options asks for an evaluation since the last one."""
        options, last = self.config.evaluation, self._evaluated_at
        times, total = options.times or 0, self.config.total_frames
        return (
            passed(options.every_frames, last, self.frames)
            or passed(options.every_updates, self._evaluated_after, self.updates)
            or passed(total, times * last, times * self.frames)
        )

    def evaluate(self) -> None:
        """Play the newest weights; the figures go into the record of these frames.

        Workers stand still meanwhile: none runs ahead, so the lag of their frames is that of a run
        without evaluations.
        """
        before_s = self.clock.evaluate_s
        with self.clock.evaluating(), self.collector.pause(), self.interruption.unchanged():
            self._last_evaluation = self.play()
        spent_s = self.clock.evaluate_s - before_s
        self._evaluated = {**self._last_evaluation, "time/evaluate_s": spent_s}
        self._evaluated_at, self._evaluated_after = self.frames, self.updates

    def save(self) -> None:
        """Write a checkpoint of everything that a resumed run needs, unless there is one."""
        if self._saved == self._progress():
            return
        with self.clock.phase("log", "checkpoint"):
            file = self.checkpoints.save(self.frames, self.state_dict())
        self._saved = self._progress()
        log.info("checkpoint %s", file.name)
        self.call("on_checkpoint", file)

    def _progress(self) -> RunPosition:
        return RunPosition(self.frames, self._logged_at, self._evaluated_at)

    def _read(self) -> tuple[dict[str, float], dict[str, Histogram]]:
        """Everything measured since the last record."""
        times, elapsed_s = self.clock.read()
        frames = self.frames - max(self._logged_at, self._started_at)
        measured, histograms = split(
            {name: x for meter in self.meters.values() for name, x in meter.read().items()}
        )
        metrics = {
            **measured,
            **self._evaluated,
            "sync/bytes": float(self.sync.num_bytes),
            "policy/version": float(self.collector.policy_version),
            "policy/dropped": float(self.dropped),
            "collector/fps": frames / max(elapsed_s, 1e-9),
            "collector/wait_ms": times["time/collect_s"] * 1e3,
            **self.counts(),
            **self._virtual_time(),
            **times,
            **system_metrics(),
        }
        self._evaluated = {}
        return metrics, histograms

    def counts(self) -> dict[str, float]:
        """Frames by what became of them, over the whole run."""
        stats = self.collector.counts()
        names = ["collected", "delivered", "dropped", "in_flight"]
        if self.config.collector.preempts:
            names.append("preempted")
        counts = {f"collector/{name}": float(stats[name]) for name in names}
        counts = {key: n + self._counted_before.get(key, 0) for key, n in counts.items()}
        if self.free_running is not None:
            counts["collector/overwritten"] = float(self.overwritten)
        return counts

    def _virtual_time(self) -> dict[str, float]:
        """The clock of simulated workers, if they are."""
        if not isinstance(self.collector, SimulatedCollector):
            return {}
        return {"sim/time_s": self.collector.schedule.time_s}

    def summary(self) -> dict[str, Any]:
        """The run's totals and percentiles."""
        frames, wall_s = self.frames - self._timed_from, self.clock.wall_s
        summaries = {
            name: x for meter in self.meters.values() for name, x in meter.summary().items()
        }
        return {
            "frames": self.frames,
            "updates": self.updates,
            **({} if self.gradient_steps is None else {"gradient_steps": self.gradient_steps}),
            "wall_s": wall_s,
            "fps": frames / wall_s,
            **summaries,
            **self._last_evaluation,
            "policy/dropped": self.dropped,
            "policy/version": int(self.collector.policy_version),
            **self.counts(),
            **self._virtual_time(),
            **{f"time/{phase}_s": spent for phase, spent in self.clock.total.items()},
            "time/evaluate_s": self.clock.evaluate_s,
        }

    # -- going on later

    def state_dict(self) -> dict[str, Any]:
        """Learner, collector, counters and random streams."""
        return {
            "learner": self.learner.state_dict(),
            "collector": self.collector.state_dict(),
            "streams": Streams().state_dict(),
            "frames": self.frames,
            "updates": self.updates,
            "gradient_steps": self.gradient_steps,
            "dropped": self.dropped,
            "overwritten": self.overwritten,
            "logged_at": self._logged_at,
            "evaluated_at": self._evaluated_at,
            "evaluated_after": self._evaluated_after,
            "last_evaluation": self._last_evaluation,
            "counts": self.counts(),
            "clock": self.clock.state_dict(),
            "published": self.published.state(),
            **{name: meter.state_dict() for name, meter in self.meters.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; version 0 is the oldest that was published."""
        self.published.publish_again(self.collector)
        self.learner.load_state_dict(state["learner"])
        if not self.collector.load_state_dict(state["collector"]):
            log.warning("the collector is not restored exactly: some episodes may start again")
        self.frames = int(state["frames"])
        self.updates = int(state["updates"])
        steps = state.get("gradient_steps")  # checkpoints of earlier versions lack them
        self.gradient_steps = None if steps is None else int(steps)
        self.dropped = int(state["dropped"])
        self.overwritten = int(state.get("overwritten", 0))  # earlier versions did not count them
        self._logged_at = int(state["logged_at"])
        self._evaluated_at = int(state["evaluated_at"])
        # Checkpoints of earlier versions lack it.
        self._evaluated_after = int(state.get("evaluated_after", self.updates))
        self._saved = self._progress()
        self._last_evaluation = _floats(state["last_evaluation"])
        # What was on its way then is gone on with only where a schedule has it.
        if "schedule" not in state["collector"]:
            self._counted_before = counts = _floats(state["counts"])
            counts["collector/dropped"] += counts.pop("collector/in_flight", 0.0)
        if "clock" in state:  # checkpoints of earlier versions lack it
            self.clock.load_state_dict(state["clock"])
        else:
            self._timed_from = self.frames
        for name, meter in self.meters.items():
            if name in state or name != "state_age":  # checkpoints of earlier versions lack it
                meter.load_state_dict(state[name])
        streams = Streams()
        streams.load_state_dict(state["streams"])
        streams.resume()


def passed(every: int | None, last: int, now: int) -> bool:
    """Whether a multiple of `every` lies after `last` and not after `now`."""
    return every is not None and now // every > last // every


def _floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
