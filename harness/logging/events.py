"""The trace of a run's samples, `events.jsonl`, which `lockstep check` reads.

A sample is what one worker adds to a batch. Its events are written when the learner takes the
batch, so they stand in the learner's order: a version is published above the first frame that it
computed. A resumed run goes on in the same file.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tensordict import TensorDictBase
from torch import nn

from harness.callbacks import Callback, RunView
from harness.errors import ConfigError
from harness.options.base import Options
from harness.registry import callbacks
from lockstep_check.ages import age
from lockstep_check.events import FILE, FORMAT, read


class TraceFile:
    """Appends to the trace of a run directory, which may have one of an earlier part of the run."""

    def __init__(self, directory: Path):
        path = directory / FILE
        self._lines: list[str] = []
        self._samples: dict[int, int] = {}  # the next number of each worker
        self._goes_on = path.is_file() and self._go_on(path)
        self._stream = open(path, "ab", buffering=0, opener=_no_link)  # noqa: SIM115

    def begin(self, *, update: int, program: str, unit: str) -> None:
        """The first line; in a trace that goes on, a line that says after which update."""
        if self._goes_on:
            self.write("resume", update=update)
        else:
            self.write("trace", format=FORMAT, program=program, unit=unit)

    def next_sample(self, worker: int) -> int:
        """The number of the worker's next sample."""
        number = self._samples.get(worker, 0)
        self._samples[worker] = number + 1
        return number

    def write(self, event: str, **fields: Any) -> None:
        """Add an event, which is in the file after `flush`."""
        self._lines.append(json.dumps({"event": event, **fields}, separators=(",", ":")))

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        data = "".join(f"{line}\n" for line in lines).encode()
        while data:
            data = data[self._stream.write(data) :]

    def close(self) -> None:
        self.flush()
        self._stream.close()

    def _go_on(self, path: Path) -> bool:
        """Take numbers up where the file ends, without a last line that is cut."""
        with open(path, "r+b", opener=_no_link) as stream:
            size = stream.read().rfind(b"\n") + 1
            stream.truncate(size)
        for _, event in read(path):
            if "sample" in event:
                number, worker = event["sample"], event["worker"]
                self._samples[worker] = max(self._samples.get(worker, 0), number + 1)
        return size > 0


@dataclass
class EventsConfig(Options):
    """The events of all samples in events.jsonl, for `lockstep check`."""

    group: ClassVar[str] = "callbacks"
    checksums: bool = True  # of each published version, to compare two runs

    def check(self, config: Any) -> None:
        if config.algo.replays:
            raise ConfigError(
                "callbacks=[events] follows samples to the update that trains on them, and this "
                "algorithm draws from a replay buffer: use algo=ppo, impala or grpo"
            )


@callbacks.register("events", options=EventsConfig)
class EventTrace(Callback):
    """Writes what became of each sample, a line an event."""

    def __init__(self, options: EventsConfig):
        super().__init__(options)
        self._applied: dict[int, int] = {}  # the newest version of each worker
        self._batch: list[tuple[int, int, dict[int, int]]] = []  # worker, sample, frames by version

    def on_run_start(self, run: RunView) -> None:
        self._file = TraceFile(run.directory)
        self._file.begin(update=run.updates, program="lockstep", unit="frames")
        newest = int(run.collector.policy_version)
        versions = np.arange(newest + 1)
        updates = run.staleness.publications.moments(versions).tolist()
        steps = run.staleness.steps.moments(versions).tolist()
        for version, moment in enumerate(zip(updates, steps, strict=True)):
            self._publish(run, version, *moment, is_newest=version == newest)
        self._file.flush()

    def on_batch(self, run: RunView, batch: TensorDictBase) -> None:
        self._note_applied(run)
        mask = batch["collector", "mask"]
        workers = batch["collector", "worker"][mask].numpy()
        versions = batch["policy_version"][mask].numpy()
        self._batch = []
        for worker in np.unique(workers).tolist():
            sample = self._file.next_sample(worker)
            numbers, counts = np.unique(versions[workers == worker], return_counts=True)
            spans = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
            for version, length in spans.items():
                self._file.write(
                    "act", worker=worker, sample=sample, version=version, length=length
                )
            self._file.write("take", worker=worker, sample=sample, version=min(spans))
            self._batch.append((worker, sample, spans))

    def on_update(self, run: RunView, metrics: dict[str, float]) -> None:
        gone: set[int] = set()
        if metrics.get("train/dropped"):
            ratios = run.learner.ratios
            taken = set() if ratios is None else set(np.unique(ratios.version.numpy()).tolist())
            gone = {version for _, _, spans in self._batch for version in spans} - taken
        for worker, sample, spans in self._batch:
            place = {"worker": worker, "sample": sample}
            steps = {} if run.gradient_steps is None else {"step": run.gradient_steps}
            for version in sorted(spans.keys() & gone):
                old = {"reason": "older than sync.max_lag", "length": spans[version]}
                self._file.write("drop", **place, **old, version=version)
            if kept := spans.keys() - gone:
                oldest, trained = min(kept), sum(spans[version] for version in kept)
                lag = age(oldest, int(run.collector.policy_version))
                self._file.write(
                    "train", **place, update=run.updates + 1, length=trained, age=lag, **steps
                )
        counts = {name.removeprefix("collector/"): int(n) for name, n in run.counts().items()}
        self._file.write("counts", **counts)
        self._file.flush()

    def on_publish(self, run: RunView, version: int) -> None:
        self._publish(run, version, run.updates, run.gradient_steps, is_newest=True)
        self._file.flush()

    def on_run_end(self, run: RunView, summary: dict[str, Any]) -> None:
        self._file.close()

    def _publish(
        self, run: RunView, version: int, update: int, step: int | None, *, is_newest: bool
    ) -> None:
        more: dict[str, Any] = {} if run.gradient_steps is None else {"step": step}
        if is_newest and self.options.checksums:
            more["checksum"] = f"{checksum(run.learner.policy):08x}"
        self._file.write("publish", version=version, update=update, **more)

    def _note_applied(self, run: RunView) -> None:
        answers = run.sync.answers_since(self._applied)
        for worker, answer in sorted(answers, key=lambda pair: pair[1].version):
            self._file.write("applied", worker=worker, version=answer.version)


def _no_link(path: str, flags: int) -> int:
    """Open a file of the run directory, and never through a link that was laid there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def checksum(policy: nn.Module) -> int:
    """CRC-32 of all parameters and buffers, in the order of their names."""
    state = policy.state_dict()
    total = 0
    for name in sorted(state):
        value = state[name]
        if hasattr(value, "detach"):
            total = zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes(), total)
    return total
