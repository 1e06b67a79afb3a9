"""A timeline of the run in `trace.json`: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

    learner                  collect | update | publish | log | evaluate | checkpoint
    worker 0   batches       batch          | batch       | ...
               applied       apply  ^ an arrow from the publish of this version
    worker 1   ...

The file is an array of events in the Trace Event Format, an event a line. A run that is killed
leaves an array without its closing bracket, which both viewers read.

Times are microseconds since the logger was made. Simulated workers and their learner have virtual
time, in which an evaluation and an apply are moments. Workers elsewhere do not send the times of
their batches: a moment marks each batch when the trainer hears of it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from collectors import SimulatedCollector
from collectors.options.check_types import Positive
from collectors.simulation.simulator import Simulator, Span
from harness.callbacks import RunView
from harness.logging import Logger, Metrics, RunInfo
from harness.measures.meters import Histogram
from harness.options.run import LoggerConfig
from harness.registry import loggers
from harness.run_directory import RunDir

log = logging.getLogger(__name__)

LEARNER, FIRST_WORKER = 1, 2  # "processes" of the trace
WORK, APPLIED = 1, 2  # their "threads"
COUNTERS = ("episode/return", "policy/lag_updates_mean", "collector/fps")
NS = 1e9


@dataclass
class TraceConfig(LoggerConfig):
    """A timeline of learner and workers in trace.json, for Perfetto or chrome://tracing."""

    max_mb: Positive = 64.0  # the largest size; later events are dropped


@loggers.register("trace", options=TraceConfig)
class TraceLogger(Logger):
    """Writes what the learner and its workers do as it happens, up to `max_mb`."""

    def __init__(self, options: TraceConfig, run_dir: RunDir, info: RunInfo):
        self._stream = _new_file(run_dir.path)
        self._room = round(options.max_mb * 2**20)
        self._zero_ns = time.perf_counter_ns()
        self._lines: list[str] = []  # not written yet
        self._ends: dict[tuple[int, int], int] = {}  # of each track
        self._applied: dict[int, int] = {}  # the newest version that each worker has applied
        self._has_events = False  # in the file
        self._run: RunView | None = None
        self._schedule: Simulator | None = None
        self._write(b"[\n")
        self._name(LEARNER, WORK, "learner", "loop")

    def start(self, run: RunView) -> None:
        self._run = run
        if isinstance(run.collector, SimulatedCollector) and isinstance(
            run.collector.schedule, Simulator
        ):
            self._schedule = run.collector.schedule
            self._schedule.watch = self._virtual
            self._zero_ns = 0

    def phase(self, work: str, start_s: float, end_s: float) -> None:
        if self._schedule is not None:
            if work in ("evaluate", "checkpoint"):
                self._moment(LEARNER, WORK, work, self._now_ns())
            self._flush()
            return
        arguments = {}
        if work == "publish" and self._run is not None:
            arguments["version"] = int(self._run.collector.policy_version)
        self._span(LEARNER, WORK, work, round(start_s * NS), round(end_s * NS), arguments)
        if work in ("collect", "publish"):
            self._workers()
        self._flush()

    def log(self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram]) -> None:
        now = self._now_ns()
        shown = {"frames": step, **{name: metrics[name] for name in COUNTERS if name in metrics}}
        for name, value in shown.items():
            if math.isfinite(value):
                self._event("C", LEARNER, WORK, name, now, args={"value": round(value, 4)})
        self._flush()

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._flush()
        with self._stream:
            self._stream.write(b"\n]\n")

    # -- what happens

    def _workers(self) -> None:
        """What workers have finished since the last time."""
        assert self._run is not None
        for batch in self._run.collector.made_batches():
            worker, arguments = FIRST_WORKER + batch.worker, {"frames": batch.num_frames}
            if batch.began_ns == batch.ended_ns:
                self._moment(worker, WORK, "batch", batch.ended_ns)
            else:
                self._span(worker, WORK, "batch", batch.began_ns, batch.ended_ns, arguments)
        answers = self._run.sync.answers_since(self._applied)
        for index, applied in sorted(answers, key=lambda answer: answer[1].version):
            worker, woken_ns = FIRST_WORKER + index, applied.published_ns + applied.wake_ns
            arguments = {
                "version": applied.version,
                "acknowledge_ms": round(applied.acknowledge_ns * 1e-6, 4),
            }
            self._span(worker, APPLIED, "apply", woken_ns, woken_ns + applied.apply_ns, arguments)
            if applied.version > 0:  # which was published in the loop
                flow = {"cat": "sync", "id": f"{applied.version}.{index}"}
                at_ns = applied.published_ns
                self._event("s", LEARNER, WORK, "version", at_ns, **flow)
                self._event("f", worker, APPLIED, "version", woken_ns, bp="e", **flow)

    def _virtual(self, span: Span) -> None:
        """Something that took virtual time, or a moment of it."""
        pid = FIRST_WORKER + span.worker if span.worker >= 0 else LEARNER
        tid = APPLIED if span.name == "apply" else WORK
        arguments = {"version": span.version} if span.version >= 0 else {}
        if span.name == "apply":
            self._moment(pid, tid, span.name, span.began_ns, arguments)
        else:
            self._span(pid, tid, span.name, span.began_ns, span.ended_ns, arguments)

    def _now_ns(self) -> int:
        if self._schedule is not None:
            return round(self._schedule.time_s * NS)
        return time.perf_counter_ns()

    # -- events

    def _span(
        self, pid: int, tid: int, name: str, start_ns: int, end_ns: int, arguments: dict[str, Any]
    ) -> None:
        """Something that took time. It begins after what came before on its track."""
        track = pid, tid
        start_ns = max(start_ns, self._ends.get(track, start_ns))
        end_ns = max(start_ns, end_ns)
        self._place(pid, tid)
        self._ends[track] = end_ns
        more = {"args": arguments} if arguments else {}
        self._event("X", pid, tid, name, start_ns, dur=(end_ns - start_ns) / 1000, **more)

    def _moment(
        self,
        pid: int,
        tid: int,
        name: str,
        at_ns: int,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self._place(pid, tid)
        more = {"args": arguments} if arguments else {}
        self._event("i", pid, tid, name, at_ns, s="t", **more)

    def _place(self, pid: int, tid: int) -> None:
        """Name a worker's tracks before its first event."""
        if pid >= FIRST_WORKER and (pid, tid) not in self._ends:
            self._ends[pid, tid] = 0
            what = "batches" if tid == WORK else "versions applied"
            self._name(pid, tid, f"worker {pid - FIRST_WORKER}", what)

    def _name(self, pid: int, tid: int, process: str, thread: str) -> None:
        for name, value in (("process_name", process), ("thread_name", thread)):
            self._event("M", pid, tid, name, self._zero_ns, args={"name": value})
        order = {"sort_index": pid}
        self._event("M", pid, tid, "process_sort_index", self._zero_ns, args=order)

    def _event(self, kind: str, pid: int, tid: int, name: str, at_ns: int, **more: Any) -> None:
        ts = (at_ns - self._zero_ns) / 1000
        event = {"ph": kind, "pid": pid, "tid": tid, "name": name, "ts": ts, **more}
        self._lines.append(json.dumps(event, separators=(",", ":")))

    def _flush(self) -> None:
        """Write what is new, whole events only."""
        lines, self._lines = self._lines, []
        if not lines or self._room <= 0:
            return
        self._write((",\n" if self._has_events else "").encode() + ",\n".join(lines).encode())
        self._has_events = True
        if self._room <= 0:
            log.warning("trace.json is full: later events are left out (logger.trace.max_mb)")

    def _write(self, data: bytes) -> None:
        self._room -= len(data)
        while data:
            data = data[self._stream.write(data) :]


def _new_file(folder: Path) -> BinaryIO:
    """`trace.json`; a resumed run, whose clock is another one, begins `trace-2.json`, and so on."""
    number = 1
    while True:
        name = "trace.json" if number == 1 else f"trace-{number}.json"
        try:
            return open(folder / name, "xb", buffering=0)  # x: through no link that was laid there
        except FileExistsError:
            number += 1
