"""Launchers that give each job of a sweep a process of its own: on this machine, or by SLURM.

sweep                                job's process
-----                                -------------
compose, pickle, submit   ------>    unpickle, compose the job's config, run it
wait for the results      <------    pickle what it returned
one that returned nothing: its directory says that the job failed, and the sweep goes on

hydra executes this file before it is in sys.modules, so there can be no dataclass in it.
"""

from __future__ import annotations

import math
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:
    from submitit import Job

ROOT = Path(__file__).resolve().parent.parent.parent
LOOK_S = 0.1  # between looks at the jobs that run
END_S = 20.0  # for a job that was asked to end: a run's own grace, and some more
# What submitit calls the same for every cluster; the rest is sbatch's.
SHARED = (
    *("name", "timeout_min", "mem_gb", "nodes", "tasks_per_node", "cpus_per_task"),
    *("gpus_per_node", "stderr_to_stdout"),
)


class JobDied(RuntimeError):
    """A job's process ended without a result."""


class Submitted(NamedTuple):
    """A job that has a process, or waits for one."""

    number: int
    directory: Path
    handle: Job[JobReturn]


class SubmititLauncher(Launcher):
    """What both have in common: how a job travels, and what becomes of one that is lost."""

    def __init__(self, *, submitit_folder: str, **parameters: Any):
        self.folder = submitit_folder
        self.parameters = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in parameters.items()
        }
        self.sweep_pid: int | None = None  # with which its jobs are to end

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def __call__(self, overrides: Sequence[str], number: int, singletons: Any) -> JobReturn:
        """One job, in its own process."""
        if self.sweep_pid is not None:
            _end_with(self.sweep_pid)
        Singleton.set_state(singletons)
        setup_globals()
        return run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=self._compose(overrides, number),
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )

    def checkpoint(self, *arguments: Any) -> Any:
        """What submitit queues again when a job was preempted: the same job, from its start."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)

    def _compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        loader = self.hydra_context.config_loader
        config = loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = os.environ.get("SLURM_JOB_ID", str(number))
            config.hydra.job.num = number
        return config

    def _directory(self, overrides: Sequence[str], number: int) -> Path:
        sweep = self._compose(overrides, number).hydra.sweep
        return Path(sweep.dir) / str(sweep.subdir)

    def _result(self, job: Submitted) -> JobReturn:
        """What the job returned; if it died, something that stands for it."""
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            return job.handle.results()[0]
        except (FailedJobError, UncompletedJobError) as error:
            return _lost(job.directory, JobDied(_last_words(job.handle) or str(error)))


class LocalLauncher(SubmititLauncher):
    """Jobs on this machine, `parallel` of them at a time."""

    def __init__(self, *, parallel: int, **parameters: Any):
        super().__init__(**parameters)
        if parallel < 1:
            raise ValueError(f"hydra.launcher.parallel={parallel}: expected 1 or more")
        self.parallel = parallel

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        self.sweep_pid = os.getpid()
        executor = _local_executor(self.folder, self.parameters)
        waiting = list(enumerate(job_overrides, initial_job_idx))
        running: list[Submitted] = []
        ended: dict[int, JobReturn] = {}
        with _importable():
            try:
                while waiting or running:
                    while waiting and len(running) < self.parallel:
                        number, overrides = waiting.pop(0)
                        directory = self._directory(overrides, number)
                        arguments = (list(overrides), number, Singleton.get_state())
                        handle = executor.submit(self, *arguments)
                        running.append(Submitted(number, directory, handle))
                    for job in [job for job in running if job.handle.done()]:
                        running.remove(job)
                        ended[job.number] = self._result(job)
                        print(f"[{len(ended)}/{len(job_overrides)}] {job.directory} has ended")
                    time.sleep(LOOK_S)
            finally:
                _end(running)
        return [ended[number] for number in sorted(ended)]


class SlurmLauncher(SubmititLauncher):
    """Jobs as one array of SLURM's; the folders must be on a disk that all nodes see."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        import submitit

        own = {"max_num_timeout"}
        given = {key: value for key, value in self.parameters.items() if key not in own}
        executor = submitit.AutoExecutor(
            folder=self.folder,
            cluster="slurm",
            slurm_max_num_timeout=self.parameters.get("max_num_timeout", 0),
        )
        executor.update_parameters(
            **{key if key in SHARED else f"slurm_{key}": value for key, value in given.items()}
        )
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        state = [Singleton.get_state()] * len(job_overrides)
        with _importable():
            handles = executor.map_array(self, list(map(list, job_overrides)), numbers, state)
        jobs = [
            Submitted(number, self._directory(overrides, number), handle)
            for number, overrides, handle in zip(numbers, job_overrides, handles, strict=True)
        ]
        print(f"submitted {', '.join(job.handle.job_id for job in jobs)}")
        try:
            return [self._result(job) for job in jobs]
        except KeyboardInterrupt:
            print("the jobs stay in SLURM's queue; scancel takes them out", file=sys.stderr)
            raise


@contextmanager
def _importable() -> Iterator[None]:
    """Let processes started here find this code, wherever they start."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _local_executor(folder: str, parameters: dict[str, Any]) -> Any:
    from submitit.local.local import LocalExecutor, LocalJob

    class Executor(LocalExecutor):
        """submitit's, but a job hears of signals from the launcher alone.

        In the terminal's process group, Ctrl-C would reach the run twice, which ends it at once,
        and submitit's controller kills what does not end within a second.
        """

        def _submit_command(self, command: str) -> LocalJob[Any]:
            environment = os.environ | {
                "SUBMITIT_EXECUTOR": "local",
                "SUBMITIT_LOCAL_COMMAND": command,
                "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
                "SUBMITIT_LOCAL_NODEID": "0",
                "SUBMITIT_LOCAL_NTASKS": "1",
                "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
                "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self.parameters["timeout_min"]),
                "SUBMITIT_LOCAL_WITH_SHELL": "",
                "SUBMITIT_STDERR_TO_STDOUT": "",
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "submitit.local._local", str(self.folder)],
                env=environment,
                start_new_session=True,
            )
            return LocalJob(self.folder, str(process.pid), tasks=[0], process=process)

    executor = Executor(folder, max_num_timeout=0, python=shlex.quote(sys.executable))
    executor.update_parameters(**parameters)
    return executor


def _end(jobs: Sequence[Submitted]) -> None:
    """Ask jobs to end, which writes their checkpoints, and end those that do not."""
    processes = [job.handle._process for job in jobs]  # type: ignore[attr-defined]
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_with(pid: int) -> None:
    """End this process, as by SIGTERM, when the sweep's is gone: killed, say."""
    if not hasattr(os, "pidfd_open"):
        return

    def watch() -> None:
        try:
            gone = os.pidfd_open(pid)
        except ProcessLookupError:
            gone = None
        if gone is not None:
            select.select([gone], [], [])
        while True:  # again, as the first may come before there is a run to end
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(END_S)

    threading.Thread(target=watch, name="lockstep-sweep", daemon=True).start()


def _last_words(handle: Job[Any]) -> str:
    """The last line of what the process wrote to stderr."""
    lines = (handle.stderr() or "").strip().splitlines()
    return lines[-1] if lines else ""


def _lost(directory: Path, error: JobDied) -> JobReturn:
    """What stands for a job that returned nothing; its directory says how it ended."""
    from harness.run_dir import RunDir

    run_dir = RunDir(directory)
    if run_dir.read_status().get("state") in (None, "running"):
        directory.mkdir(parents=True, exist_ok=True)
        run_dir.end("failed", summary={}, error=error)
    found = JobReturn()
    found.status = JobStatus.COMPLETED
    found.return_value = math.nan
    return found
