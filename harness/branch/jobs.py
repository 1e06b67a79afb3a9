"""Runs in processes of their own, several at a time.

A process prints into a file. Ctrl-C ends each run with a checkpoint, and no further one starts.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness.config.plan import RunPlan
from harness.run.processes import end, end_with, write_to

FAILED = 1


@dataclass(frozen=True)
class Job:
    """One run, and the file for what it prints."""

    plan: RunPlan
    output: Path


def run_jobs(jobs: Sequence[Job], parallel: int) -> Iterator[tuple[Job, int]]:
    """Do the runs; each one when it has ended, with its exit status, negative for a signal."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.run.execution", __name__])
    waiting = list(jobs)
    running: list[tuple[Job, BaseProcess]] = []
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                job.output.parent.mkdir(parents=True, exist_ok=True)
                process: BaseProcess = context.Process(target=run_job, args=(job, os.getpid()))
                process.start()
                running.append((job, process))
            wait([process.sentinel for _, process in running])
            for job, process in [one for one in running if not one[1].is_alive()]:
                process.join()
                running.remove((job, process))
                yield job, FAILED if process.exitcode is None else process.exitcode
    finally:
        end([process for _, process in running])


def run_job(job: Job, caller: int) -> None:
    """Do one run, in its process."""
    from harness.errors import ConfigError
    from harness.run.execution import execute

    os.setsid()  # Ctrl-C in the terminal reaches the command alone, which passes it on once
    write_to(job.output)
    end_with(caller)
    try:
        status = execute(job.plan).exit_status
    except ConfigError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        status = FAILED
    sys.exit(status)
