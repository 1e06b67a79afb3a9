"""Runs a sweep's jobs on this machine, several at a time, each in a process of its own.

sweep                                  job's process, forked where the libraries are loaded
-----                                  ----------------------------------------------------
compose the job's config
send the pickled job         ------>   run it; output goes to <sweep>/.output/<job>.txt
wait until it has ended      <------   send the pickled result
no result: mark the job as failed in its status.json

Hydra executes this file before it adds it to sys.modules, so it defines no dataclass.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import cloudpickle
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

# What a run imports. The fork server loads it once, and forks the jobs and their workers from it.
PRELOAD = (
    "collectors.workers.worker_loop",
    "gymnasium.envs.classic_control",
    "harness.run.run_lifetime",
    "hydra.main",
    __name__,
)
COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")  # what algo.compile=true imports besides


class JobDied(RuntimeError):
    """A job's process ended without a result."""


class LaunchedJob(NamedTuple):
    """A job whose process was started."""

    number: int
    config: DictConfig
    directory: Path
    output: Path
    process: BaseProcess
    result: Connection

    def has_ended(self) -> bool:
        """Whether there is a result, or the process is gone."""
        return self.result.poll() or not self.process.is_alive()


class LocalLauncher(Launcher):
    """`hydra/launcher=local`; its option is described in conf/hydra/launcher/local.yaml."""

    def __init__(self, *, parallel: int):
        if parallel < 1:
            raise ValueError(f"hydra.launcher.parallel={parallel}: expected 1 or more")
        self.parallel = parallel
        self.processes = multiprocessing.get_context("forkserver")

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config
        compiles = OmegaConf.select(config, "algo.compile")
        self.processes.set_forkserver_preload([*PRELOAD, *(COMPILER if compiles else ())])

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from harness.run.processes import end  # here: Hydra imports this file in every run

        waiting = list(enumerate(job_overrides, initial_job_idx))
        running: list[LaunchedJob] = []
        results: dict[int, JobReturn] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.parallel:
                    running.append(self._start(*waiting.pop(0)))
                wait([place for job in running for place in (job.result, job.process.sentinel)])
                for job in [job for job in running if job.has_ended()]:
                    results[job.number] = result_of(job)
                    running.remove(job)
        finally:
            end([job.process for job in running])
        return [results[number] for number in sorted(results)]

    def _start(self, number: int, overrides: Sequence[str]) -> LaunchedJob:
        """Start the process of a job."""
        loader = self.hydra_context.config_loader
        config = loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        sweep = config.hydra.sweep
        output = Path(sweep.dir) / ".output" / f"{sweep.subdir}.txt"
        output.parent.mkdir(parents=True, exist_ok=True)
        job = (Singleton.get_state(), self.hydra_context, self.task_function, config)
        result, sender = self.processes.Pipe(duplex=False)
        process = self.processes.Process(
            target=run_given_job,
            args=(cloudpickle.dumps(job), dict(os.environ), str(output), os.getpid(), sender),
            name=f"lockstep-job-{number}",
        )
        process.start()
        sender.close()
        return LaunchedJob(
            number, config, Path(sweep.dir) / str(sweep.subdir), output, process, result
        )


def result_of(job: LaunchedJob) -> JobReturn:
    """What the job returned; NaN if its process died."""
    with job.result:
        try:
            result = pickle.loads(job.result.recv_bytes()) if job.result.poll() else None
        except EOFError:
            result = None
        job.process.join()
    if result is None:
        mark_failed(job)
        result = JobReturn()
        result.status = JobStatus.COMPLETED
        result.return_value = math.nan
    return result


def mark_failed(job: LaunchedJob) -> None:
    """Record in the job's directory that its process died, unless the run recorded its own end."""
    from harness.run_directory import RunDir

    run_dir = RunDir(job.directory)
    status = run_dir.read_status()
    began = status.get("pid") == job.process.pid
    if began and status.get("state") != "running":
        return
    code = job.process.exitcode
    assert code is not None
    how = (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    )
    error = JobDied(f"the job's process {how}; its output is in {job.output}")
    if began:
        run_dir.end("failed", summary={}, error=error)
    else:
        RunDir.record_failure(job.directory, config=OmegaConf.to_yaml(job.config), error=error)


# -- in the job's process


def run_given_job(
    pickled: bytes, environment: dict[str, str], output: str, sweep_pid: int, result: Connection
) -> None:
    """Run a job, and send its pickled result."""
    from harness.run.processes import end_with, write_to

    # Ctrl-C in the terminal reaches the sweep alone, which passes it on once: a second signal would
    # end the run without a checkpoint.

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    write_to(output)
    end_with(sweep_pid)
    singletons, hydra_context, task_function, config = pickle.loads(pickled)
    Singleton.set_state(singletons)
    setup_globals()
    job = run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    result.send_bytes(cloudpickle.dumps(job))
