"""A sweep while it runs: which jobs have ended, and whether further ones start."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from harness.files import read_json
from harness.logging.dashboard import duration
from harness.numbers import count
from harness.run_directory import RunDir
from harness.sweep.bars import JobBars

log = logging.getLogger(__name__)

STARTED = "multirun.yaml"  # written by the sweeper when the sweep is started
NEVER_STARTED = "never started"
LOOK_S = 0.5


class Progress:
    """The states of a sweep's jobs; prints a line for each job that ends.

    On a terminal, jobs that run elsewhere have bars.

    A job has ended if its status.json says so and is not the file that was there before the sweep.

    folder: the sweep's. jobs: the jobs' directories; None if only the sweeper knows them. skipped:
    those whose runs were finished before.
    """

    def __init__(
        self, folder: Path, jobs: Sequence[Path] | None = None, skipped: Sequence[Path] = ()
    ):
        self._here = Path.cwd()  # a job may work elsewhere
        self._folder, self._jobs = folder, jobs
        self._ended = dict.fromkeys(skipped, "done")
        self._before = {job: self._stamp(job) for job in self._known()}
        self._begun_at, self._num_skipped = time.monotonic(), len(skipped)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._running: list[Path] = []
        self._bars: JobBars | None = None
        self._thread = threading.Thread(target=self._watch, name="lockstep-sweep", daemon=True)

    def plan(self, parallel: int) -> str:
        """How many jobs there are, and how many of them are left to do."""
        num_jobs = len(self._known())
        left = num_jobs - self._num_skipped
        done = f", {self._num_skipped} done before" if self._num_skipped else ""
        return f"{count(num_jobs, 'job')}{done}, {left} to run, {min(parallel, left)} at a time"

    def start(self, *, console: Console | None = None) -> None:
        """Look now and then, for jobs that run in other processes.

        console: where running jobs have bars, if it is a terminal.
        """
        if console is not None and console.is_terminal:
            self._bars = JobBars(console)
            self._bars.start()
        self._thread.start()

    def stop(self) -> None:
        """Look for the last time."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.look()
        self._remove_bars()

    def look(self) -> None:
        """Print a line for each job that has ended since the last look."""
        with self._lock:
            self._running = []
            for job in self._known():
                if job in self._ended or self._stamp(job) == self._before.get(job):
                    continue
                state = self._status(job).get("state")
                if state == "running":
                    self._running.append(job)
                elif isinstance(state, str):
                    self._ended[job] = state
                    print(self._line(job, state), flush=True)

    def states(self) -> dict[Path, str]:
        """How each job stands. Of a search, only those that were started since it began."""
        jobs = self._known()
        if self._jobs is None:
            jobs = [job for job in jobs if self._stamp(job) != self._before.get(job)]
        return {job: self._state(job) for job in jobs}

    def error(self, job: Path) -> str:
        """What the job's run says of its failure."""
        return str(self._status(job).get("error") or "")

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look()
            try:
                if self._bars is not None:
                    self._bars.draw([self._here / job for job in self._running])
            except (Exception, SystemExit):  # rich makes the latter of a closed pipe
                log.info("the bars failed, the sweep goes on without them", exc_info=True)
                self._remove_bars()

    def _remove_bars(self) -> None:
        bars, self._bars = self._bars, None
        if bars is not None:
            with suppress(Exception, SystemExit):
                bars.stop()

    def _known(self) -> list[Path]:
        if self._jobs is not None:
            return list(self._jobs)
        files = (self._here / self._folder).glob("*/status.json")
        return [self._folder / file.parent.name for file in sorted(files)]

    def _status(self, job: Path) -> dict[str, object]:
        return RunDir(self._here / job).read_status()

    def _stamp(self, job: Path) -> tuple[int, int] | None:
        """What tells a status.json from any other one that was or will be there."""
        try:
            status = RunDir(self._here / job).status.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _state(self, job: Path) -> str:
        if job in self._ended:
            return self._ended[job]
        if self._jobs is not None and self._stamp(job) == self._before[job]:
            return NEVER_STARTED
        state = str(self._status(job).get("state"))
        is_dead = state == "running" and not RunDir(self._here / job).is_alive()
        return "died" if is_dead else state

    def _line(self, job: Path, state: str) -> str:
        """How many have ended, how this one did, and how long the rest takes at this pace."""
        num_ended = len(self._ended)
        if self._jobs is None:
            return f"[{num_ended}] {job}: {state}"
        num_left = len(self._jobs) - num_ended
        pace_s = (time.monotonic() - self._begun_at) / (num_ended - self._num_skipped)
        goes_on = num_left and state != "interrupted"
        left = f", {duration(pace_s * num_left)} left" if goes_on else ""
        return f"[{num_ended}/{len(self._jobs)}] {job}: {state}{left}"


def failures(folder: Path) -> int:
    """How many jobs in a sweep's directory have failed since the sweep was last started."""
    started = folder / STARTED
    since = started.stat().st_mtime_ns if started.exists() else 0
    return sum(
        read_json(file).get("state") == "failed" and file.stat().st_mtime_ns >= since
        for file in folder.glob("*/status.json")
    )


def is_stopped(folder: Path, limit: int | None) -> bool:
    """Whether so many jobs have failed that no other may start; `limit` None: never."""
    return limit is not None and failures(folder) >= limit
