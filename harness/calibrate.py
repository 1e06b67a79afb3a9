"""Measure the costs of a real run for a simulation: `python -m harness.calibrate RUN`.

RUN is the directory of a run with collector=multi_async. The command prints overrides for run.py.
Together with the other options of that run, they simulate a cluster of the same speed and lag:

    python run.py $(python -m harness.calibrate RUN --lines) env=cartpole total_frames=1e6

Without --lines they are printed on one line, quoted for a shell.

If workers and learner share cores, the costs include this and only hold for as many workers.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectors.schedule.recording import Delivery
from collectors.simulation.costs import Cost, Costs
from collectors.simulation.simulator import Simulator
from harness.config.stored import read_options
from harness.files import one_line
from harness.measures.lags import lag_figures
from harness.options.base import build
from harness.options.collectors import MultiAsyncConfig
from harness.options.simulated import SimulatedConfig
from harness.options.sync import SyncConfig
from harness.registry import schemes
from harness.report.runs import Run, read_run
from harness.run_directory import SCHEDULE
from lockstep_check.ages import age

USAGE_ERROR = 2
MOST_BATCHES = 2_000_000
WARM_UP = 10  # batches that do not count
FEWEST = 30  # batches
SIMULATED = 2_000  # batches, at most, to see what the costs so far leave unexplained
METRICS = (
    "time/train_s",
    "time/sync_s",
    "time/log_s",
    "time/collect_s",
    "sync/bytes",
    "eval/return",
)
QUICK = 10  # percentile: batches for which the learner waits least


@dataclass(frozen=True)
class Figures:
    """What is predicted, and can be measured."""

    lag_mean: float
    lag_p95: float
    fps: float
    waits_s: Sequence[float] = ()  # of the learner, for each batch


@dataclass(frozen=True)
class Recording:
    """The schedule of a run: how long its batches took, and when they were taken."""

    num_workers: int
    num_steps: int
    num_envs: int
    made_s: np.ndarray
    at_s: np.ndarray

    @property
    def frames_per_batch(self) -> int:
        """Of one worker."""
        return self.num_steps * self.num_envs

    @property
    def fps(self) -> float:
        """Frames a second, between the first batch and the last."""
        return float(self.frames_per_batch / np.diff(self.at_s).mean())


@dataclass(frozen=True)
class Calibration:
    """The costs of a run, and the options that its simulation needs beside them."""

    recording: Recording
    collector: MultiAsyncConfig
    sync: SyncConfig
    costs: Costs
    nbytes: int  # of a version

    def overrides(self) -> list[str]:
        """For run.py."""
        texts = {
            "num_workers": str(self.recording.num_workers),
            "frames_per_batch": str(self.recording.frames_per_batch),
            "batches_ahead": str(self.collector.batches_ahead),
        }
        for name in ("step_ms", "policy_ms", "take_ms", "update_ms", "publish_ms", "log_ms"):
            texts[f"costs.{name}"] = shown(getattr(self.costs, name))
        return ["collector=simulated", *(f"collector.{key}={text}" for key, text in texts.items())]

    def predict(self, batches: int, seed: int = 0) -> Figures:
        """Simulate so many batches."""
        recording, sync = self.recording, self.sync
        link = getattr(sync, "link", None)
        simulator = Simulator(
            num_workers=recording.num_workers,
            num_steps=recording.num_steps,
            seed=seed,
            costs=self.costs,
            link=None if link is None else link.make(),
            batches_ahead=self.collector.batches_ahead,
            max_lag=sync.max_lag if sync.on_stale == "wait" else None,
            blocking=sync.blocking,
            apply_at=sync.apply_at,
        )
        driven = drive(simulator, batches, sync.interval, self.nbytes)
        figures = lag_figures(driven.lags)
        fps = recording.frames_per_batch / driven.batch_s if driven.batch_s else math.inf
        return Figures(figures["policy/lag_mean"], figures["policy/lag_p95"], fps, driven.waits_s)


class Driven(NamedTuple):
    """What a learner met: steps by their lag, the mean time from batch to batch, and its waits."""

    lags: Counter[int]
    batch_s: float
    waits_s: list[float]


def drive(simulator: Simulator, batches: int, interval: int, nbytes: int) -> Driven:
    """Take batches and publish as a learner does."""
    lags: Counter[int] = Counter()
    newest, first_s, last_s = 0, 0.0, 0.0
    waits_s = []
    for number in range(1, batches + 1):
        plan = simulator.next_batch()
        last_s = simulator.time_s
        waits_s.append(simulator.waited_s)
        first_s = last_s if number == 1 else first_s
        ends = [*(step for step, _ in plan.versions[1:]), simulator.num_steps]
        for (step, version), end in zip(plan.versions, ends, strict=True):
            lags[age(version, newest)] += end - step
        if number % interval == 0:
            newest += 1
            simulator.publish(newest, [Delivery(newest, nbytes, range(simulator.num_workers))])
    return Driven(lags, (last_s - first_s) / (batches - 1), waits_s)


def calibrate(directory: Path) -> Calibration:
    """The costs of the run in a directory. `ValueError` or `OSError` if they cannot be read."""
    collector, sync = read_parts(read_options(directory))
    recording = read_recording(directory)
    if recording.frames_per_batch != collector.frames_per_batch:
        raise ValueError(f"{directory}: {SCHEDULE} and config.yaml have different batch sizes")
    if len(recording.at_s) < FEWEST:
        batches = len(recording.at_s)
        raise ValueError(f"{directory}: {batches} batches are too few, expected {FEWEST} or more")
    run = read_run(directory, METRICS, name=directory.name, source="")
    train, publish, log = (per_batch(run, name, recording) for name in METRICS[:3])
    rounds = max(1, len(recording.at_s) // sync.interval)
    publish_ms = 0.0 if sync.blocking else float(publish.mean()) * sync.interval  # it also waits
    calibration = Calibration(
        recording,
        collector,
        sync,
        Costs(
            step_ms=spread(recording.made_s[WARM_UP:] * 1e3, 1 / recording.num_steps),
            update_ms=spread(train),
            publish_ms=Cost(publish_ms),
            log_ms=Cost(float(log.mean())),
        ),
        nbytes=int(np.nanmax([0.0, *run.records["sync/bytes"]]) / rounds),
    )
    return replace(
        calibration,
        costs=replace(calibration.costs, take_ms=Cost(unexplained_ms(calibration, run))),
    )


def unexplained_ms(calibration: Calibration, run: Run) -> float:
    """How much longer the learner takes for a batch than the simulation so far says.

    It shows in its pace, unless that is the workers'. Even then it shows where the learner waits
    least: for batches that were ready before.
    """
    recording = calibration.recording
    records = run.records
    evaluated = records["step"][records["eval/return"].notna()] // recording.frames_per_batch
    gaps = np.diff(recording.at_s)
    counts = ~np.isin(np.arange(1, len(gaps) + 1), evaluated)
    counts[:WARM_UP] = False
    if not counts.any():
        raise ValueError(f"{run.name} evaluates after every batch: its pace cannot be measured")
    predicted = calibration.predict(max(FEWEST, min(SIMULATED, len(gaps))))
    by_pace = gaps[counts].mean() - recording.frames_per_batch / predicted.fps
    collect_ms = per_batch(run, "time/collect_s", recording)
    by_wait = np.percentile(collect_ms / 1e3, QUICK) - np.percentile(predicted.waits_s, QUICK)
    return max(0.0, float(by_pace), float(by_wait)) * 1e3


def per_batch(run: Run, name: str, recording: Recording) -> np.ndarray:
    """Milliseconds for a batch in this phase: of each record, without those with evaluations."""
    batches = np.diff(run.records["step"], prepend=0) / recording.frames_per_batch
    values, evaluated = (run.records[key].to_numpy() for key in (name, "eval/return"))
    usable = (values >= 0) & (batches >= 1) & np.isnan(evaluated)
    usable &= np.cumsum(batches) > WARM_UP
    if not usable.any():
        raise ValueError(f"{run.name}/metrics.jsonl has no values of {name}")
    repeats = np.minimum(batches[usable], MOST_BATCHES).astype(int)
    return np.repeat(values[usable] / batches[usable] * 1e3, repeats)


def spread(values_ms: np.ndarray, scale: float = 1.0) -> Cost:
    """Of these mean and spread, drawn for each batch."""
    mean = float(values_ms.mean())
    cv = float(values_ms.std() / mean) if mean else 0.0
    if cv < 0.001:
        return Cost(mean * scale)
    return Cost(mean * scale, "lognormal", min(cv, 10.0), "batch")


def shown(cost: Cost) -> str:
    """As an option: a number, or a mapping."""
    if cost.is_constant:
        return f"{cost.mean:.4g}"
    return f"{{kind:{cost.kind},mean:{cost.mean:.4g},cv:{cost.cv:.3g},each:{cost.each}}}"


# -- reading a run


def read_parts(options: dict[str, Any]) -> tuple[MultiAsyncConfig, SyncConfig]:
    """The collector's and the scheme's options, as a run stores them. Nothing is imported."""
    groups = []
    for group in ("collector", "sync"):
        group_options = options.get(group)
        if not isinstance(group_options, dict):
            raise ValueError(f"config.yaml: {group}={group_options!r}: expected a group of options")
        groups.append(group_options)
    collector, sync = groups
    if collector.get("name") != "multi_async":
        raise ValueError(
            f"collector={collector.get('name')}: only collector=multi_async can be calibrated by"
        )
    kind = schemes.get(sync.get("name")).options
    assert kind is not None
    scheme: Any = build(kind, sync, "sync")
    if not scheme.versions_travel:
        raise ValueError(f"sync={scheme.name}: it sends no versions that could be simulated")
    return build(MultiAsyncConfig, collector, "collector"), scheme


def read_recording(directory: Path) -> Recording:
    """The schedule that a run recorded. `ValueError` if it cannot be read, or was resumed."""
    schedule = SimulatedConfig.recording(str(directory))
    header, made_s, at_s = schedule.header, np.array(schedule.made_s), np.array(schedule.at_s)
    if header.group_size > 1:
        raise ValueError(
            f"{directory / SCHEDULE}: {header.group_size} workers made each batch together, and "
            "simulated workers make batches alone"
        )
    times = np.concatenate([made_s, at_s])
    wrong = ~np.isfinite(times).all() or (made_s <= 0).any() or (np.diff(at_s) < 0).any()
    if wrong or (len(at_s) > 1 and at_s[-1] <= at_s[0]):
        raise ValueError(f"{directory / SCHEDULE}: its times are damaged")
    return Recording(header.num_workers, header.num_steps, header.num_envs, made_s, at_s)


# -- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        calibration = calibrate(options.run_dir)
    except (ValueError, OSError) as error:
        print(f"calibrate: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    words = calibration.overrides()
    print("\n".join(words) if options.lines else shlex.join(words))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="lockstep calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 the overrides are printed; 2 the run cannot be read.",
    )
    flags.add_argument("run_dir", type=Path, metavar="RUN", help="the run's directory")
    flags.add_argument("--lines", action="store_true", help="one per line, without quotes")
    return flags


if __name__ == "__main__":
    sys.exit(main())
