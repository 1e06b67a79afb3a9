"""Hours of training with a worker killed every minute: does anything grow, slow down or drift?

    make soak                         or
    .venv/bin/python benchmarks/soak.py [--minutes 60] [--algos ppo,sac] [--restart-every 60]
        [--output outputs/benchmarks]

Each algorithm trains with `collector=multi_async`, `sync=shared_mem` and restarts, by the command
line; every `--restart-every` seconds one of its workers is killed. Every second memory, descriptors
and threads of the trainer, memory of its workers and what lies in /dev/shm are read. A slope is
that of a line through means of ten equal pieces of the time after the first third, with its 95 %
interval. At the end the run is interrupted and has to end well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.soak_figures import Soak, figures, show  # noqa: E402

SHM = Path("/dev/shm")
COMMON = (
    "collector=multi_async",
    "sync=shared_mem",
    "logger=jsonl",
    "total_frames=1_000_000_000",
    "collector.on_worker_failure=restart",
    "collector.max_restarts=1_000_000",
    "evaluation.at_end=false",
    "checkpoint.every_frames=100_000",
    "env.num_envs=4",
)
OPTIONS = {
    "ppo": ("algo=ppo", "env=cartpole", "collector.frames_per_batch=512"),
    # A buffer that is full soon: while it fills, memory grows as it should.
    "sac": (
        "algo=sac",
        "env=pendulum",
        "collector.frames_per_batch=64",
        "algo.buffer_size=20_000",
        "algo.learning_starts=1_000",
        "algo.updates_per_frame=0.1",
    ),
}


@dataclass
class Sample:
    """What a run uses at one moment."""

    seconds: float
    trainer_mb: float
    workers_mb: float
    descriptors: int
    threads: int
    processes: int
    shm_entries: int
    shm_mb: float


class Trainer:
    """A run in a process of its own, and its workers."""

    def __init__(self, algo: str, directory: Path):
        self.directory = directory
        self._errors = directory.with_name("errors")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, str(ROOT / "run.py"), *COMMON, *OPTIONS[algo]),
                    f"hydra.run.dir={directory}",
                ],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self._seen = psutil.Process(self._process.pid)
        self._next = 0

    def wait_for_records(self, bound_s: float = 120.0) -> None:
        """Until it trains."""
        deadline = time.monotonic() + bound_s
        while not (self.directory / "metrics.jsonl").exists() or not self.records():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not start: {self.said}")
            time.sleep(0.1)

    @property
    def said(self) -> str:
        return self._errors.read_text(errors="replace")

    def is_running(self) -> bool:
        return self._process.poll() is None

    def workers(self) -> list[psutil.Process]:
        """Those that are children of the fork server."""
        children = self._seen.children(recursive=True)
        return [child for child in children if child.ppid() != self._seen.pid]

    def kill_a_worker(self) -> bool:
        """One after the other; whether there was one."""
        workers = self.workers()
        if not workers:
            return False
        self._next += 1
        with contextlib.suppress(psutil.NoSuchProcess):
            workers[self._next % len(workers)].kill()
        return True

    def sample(self, seconds: float) -> Sample:
        """Look at it now."""
        workers = []
        for worker in self.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                workers.append(worker.memory_info().rss / 2**20)
        shared = [found for file in SHM.iterdir() if (found := _size(file)) is not None]
        return Sample(
            seconds=seconds,
            trainer_mb=self._seen.memory_info().rss / 2**20,
            workers_mb=sum(workers) / max(1, len(workers)),
            descriptors=self._seen.num_fds(),
            threads=self._seen.num_threads(),
            processes=len(self._seen.children(recursive=True)),
            shm_entries=len(shared),
            shm_mb=sum(shared) / 2**20,
        )

    def end(self, bound_s: float = 60.0) -> int:
        """By Ctrl-C; the exit status."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(bound_s)

    def kill(self) -> None:
        """Whatever is left of it."""
        if self.is_running():
            self._process.kill()
            self._process.wait()

    def records(self) -> list[dict[str, Any]]:
        """The whole records of metrics.jsonl."""
        found = []
        for line in (self.directory / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # somebody else's, and gone
        return None


def soak(algo: str, minutes: float, restart_every_s: float) -> Soak:
    """Train for so long, watched and disturbed."""
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        trainer = Trainer(algo, Path(folder) / "run")
        try:
            trainer.wait_for_records()
            samples, kills = [], 0
            next_kill_s = restart_every_s
            for seconds in ticks(minutes * 60):
                if not trainer.is_running():
                    raise RuntimeError(f"{algo} ended after {seconds:.0f} s: {trainer.said}")
                if seconds >= next_kill_s:
                    kills += trainer.kill_a_worker()
                    next_kill_s += restart_every_s
                with contextlib.suppress(psutil.NoSuchProcess):
                    samples.append(trainer.sample(seconds))
            status = trainer.end()
            state = json.loads((trainer.directory / "status.json").read_text())["state"]
            table = [asdict(sample) for sample in samples]
            return Soak(algo, minutes, kills, status, state, table, trainer.records())
        finally:
            trainer.kill()


def ticks(total_s: float, every_s: float = 1.0) -> Iterator[float]:
    """Seconds since the start, about every second."""
    begun = time.monotonic()
    while (now := time.monotonic() - begun) < total_s:
        yield now
        time.sleep(max(0.0, every_s - (time.monotonic() - begun - now)))


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="of each algorithm")
    parser.add_argument("--algos", default="ppo,sac")
    parser.add_argument("--restart-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    found = {}
    for algo in arguments.algos.split(","):
        if algo not in OPTIONS:
            parser.error(f"--algos {algo}: expected {' or '.join(OPTIONS)}")
        print(f"soaking {algo} for {arguments.minutes:g} minutes", flush=True)
        run = soak(algo, arguments.minutes, arguments.restart_every)
        found[algo] = {"figures": figures(run), "samples": run.samples}
        show(run, found[algo]["figures"])
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "soak.json"
    about = {"cores": os.cpu_count(), "minutes": arguments.minutes}
    file.write_text(json.dumps({"about": about, "soaks": found}, indent=1))
    print(f"saved {file}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
