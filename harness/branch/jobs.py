"""Runs in processes of their own, several at a time.

A process prints into a file. Ctrl-C ends each run with a checkpoint, and no further one starts.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from harness.config.plan import RunPlan
from harness.run.processes import end, end_with, write_to

FAILED = 1


@dataclass(frozen=True)
class Job:
    """One run, and the file for what it prints."""

    plan: RunPlan
    output: Path


class Ended(NamedTuple):
    """A run that has ended."""

    job: Job
    status: int  # of its process, negative for a signal
    seconds: float  # from the start of the process to its end


def run_jobs(jobs: Sequence[Job], parallel: int) -> Generator[Ended]:
    """Do the runs; each one when it has ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.run.run_lifetime", __name__])
    waiting = list(jobs)
    running: list[tuple[Job, BaseProcess, float]] = []
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                job.output.parent.mkdir(parents=True, exist_ok=True)
                process: BaseProcess = context.Process(target=run_job, args=(job, os.getpid()))
                running.append((job, process, time.monotonic()))
                process.start()
            wait([process.sentinel for _, process, _ in running])
            for job, process, start in [one for one in running if not one[1].is_alive()]:
                process.join()
                running.remove((job, process, start))
                status = FAILED if process.exitcode is None else process.exitcode
                yield Ended(job, status, time.monotonic() - start)
    finally:
        end([process for _, process, _ in running])


def run_job(job: Job, caller: int) -> None:
    """Do one run, in its process."""
    from harness.errors import ConfigError
    from harness.run.run_lifetime import execute

    os.setsid()  # Ctrl-C in the terminal reaches the command alone, which passes it on once
    write_to(job.output)
    end_with(caller)
    try:
        status = execute(job.plan).exit_status
    except ConfigError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        status = FAILED
    sys.exit(status)
