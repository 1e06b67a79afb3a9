"""Runs a sweep's jobs on this machine, several at a time, each in a process of its own.

sweep                                  job's process
-----                                  -------------
compose the job's config
pickle the job to its stdin  ------>   run it; output goes to <sweep>/.output/<job>.txt
wait until it has ended      <------   pickle the result
no result: mark the job as failed in its status.json

Hydra executes this file before it adds it to sys.modules, so it defines no dataclass.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import cloudpickle
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

POLL_S = 0.1  # between checks for jobs that have ended
GRACE_S = 20.0  # for a job to write its checkpoint after SIGTERM
# A job imports from where the sweep does. Its main module is this text and not a file, since the
# workers that it starts would import the file, and Hydra with it.
START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    f"from {__name__} import run_given_job; run_given_job(*map(int, sys.argv[1:]))"
)


class JobDied(RuntimeError):
    """A job's process ended without a result."""


class Job(NamedTuple):
    """A job whose process was started."""

    number: int
    config: DictConfig
    directory: Path
    output: Path
    process: subprocess.Popen[bytes]
    result: IO[bytes]


class LocalLauncher(Launcher):
    """`hydra/launcher=local`; its option is described in conf/hydra/launcher/local.yaml."""

    def __init__(self, *, parallel: int):
        if parallel < 1:
            raise ValueError(f"hydra.launcher.parallel={parallel}: expected 1 or more")
        self.parallel = parallel

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        waiting = list(enumerate(job_overrides, initial_job_idx))
        running: list[Job] = []
        results: dict[int, JobReturn] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.parallel:
                    running.append(self._start(*waiting.pop(0)))
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    results[job.number] = result_of(job)
                time.sleep(POLL_S)
        finally:
            end([job.process for job in running])
        return [results[number] for number in sorted(results)]

    def _start(self, number: int, overrides: Sequence[str]) -> Job:
        """Start the process of a job."""
        loader = self.hydra_context.config_loader
        config = loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        sweep = config.hydra.sweep
        output = Path(sweep.dir) / ".output" / f"{sweep.subdir}.txt"
        output.parent.mkdir(parents=True, exist_ok=True)
        result = tempfile.TemporaryFile()  # noqa: SIM115 - open until the result was read
        job = (sys.argv, Singleton.get_state(), self.hydra_context, self.task_function, config)
        with tempfile.TemporaryFile() as pickled, output.open("wb") as file:
            pickle.dump(sys.path, pickled)
            cloudpickle.dump(job, pickled)
            pickled.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", START, str(os.getpid()), str(result.fileno())],
                stdin=pickled,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[result.fileno()],
                # Ctrl-C in the terminal reaches the sweep alone, which passes it on once: a second
                # signal would end the run without a checkpoint.
                start_new_session=True,
            )
        return Job(number, config, Path(sweep.dir) / str(sweep.subdir), output, process, result)


def result_of(job: Job) -> JobReturn:
    """What the job returned; NaN if its process died."""
    with job.result:
        job.result.seek(0)
        try:
            result = pickle.load(job.result)
        except (EOFError, pickle.UnpicklingError):
            mark_failed(job)
            result = JobReturn()
            result.status = JobStatus.COMPLETED
            result.return_value = math.nan
    return result


def mark_failed(job: Job) -> None:
    """Record in the job's directory that its process died, unless the run recorded its own end."""
    from harness.run.directory import RunDir

    run_dir = RunDir(job.directory)
    status = run_dir.read_status()
    began = status.get("pid") == job.process.pid
    if began and status.get("state") != "running":
        return
    code = job.process.returncode
    how = (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    )
    error = JobDied(f"the job's process {how}; its output is in {job.output}")
    if began:
        run_dir.end("failed", summary={}, error=error)
    else:
        RunDir.record_failure(job.directory, config=OmegaConf.to_yaml(job.config), error=error)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, on which runs write their checkpoints; kill those that do not end in time.

    A second Ctrl-C leaves them no time.
    """
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            deadline = time.monotonic()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# -- in the job's process


def run_given_job(sweep_pid: int, result_fd: int) -> None:
    """Run the job that follows on stdin, and write its pickled result to a file descriptor."""
    end_with(sweep_pid)
    # The manifest names the sweep's command.
    sys.argv, singletons, hydra_context, task_function, config = pickle.load(sys.stdin.buffer)
    Singleton.set_state(singletons)
    setup_globals()
    result = run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    with open(result_fd, "wb") as file:
        cloudpickle.dump(result, file)


def end_with(sweep_pid: int) -> None:
    """Send SIGTERM to this process once the sweep's process has ended, even if it was killed."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return

    def watch() -> None:
        with suppress(ProcessLookupError):  # it has ended already
            select.select([os.pidfd_open(sweep_pid)], [], [])
        while True:  # repeated, as the first may arrive before the run handles signals
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(GRACE_S)

    threading.Thread(target=watch, name="lockstep-sweep", daemon=True).start()
