"""Sweeps as a user runs them: launchers, killed ones, and jobs that do not know of each other."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import wandb
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

import run
from harness.config.compose import Place
from harness.config.plan import plan_run
from harness.errors import ConfigError
from harness.files import parse_yaml, read_json, write_json
from harness.logging import Loggers
from harness.options.base import build
from harness.options.run import CommandConfig
from harness.report import main as report
from harness.run.run_lifetime import own_state
from harness.run_comparison import compare_records, compare_weights
from harness.sweep.progress import failures
from harness.sweep.sweep import JobLoader, check_launcher
from tests.harness.logging import wandb_file
from tests.harness.small import ROOT, SMALL, Command, jobs, states, wait_until

pytestmark = pytest.mark.usefixtures("here")

LOCAL = "hydra/launcher=local"
SLURM = "hydra/launcher=submitit_slurm"
DEADLY = "env.id=tests.harness.deadly:Deadly-v0"


def test_ctrl_c_while_a_job_is_being_finished_ends_the_sweep_after_it(monkeypatch, capsys):
    finish = Loggers.finish

    def interrupted(*given):
        os.kill(os.getpid(), signal.SIGINT)
        finish(*given)

    monkeypatch.setattr(Loggers, "finish", interrupted)
    Path("mine").mkdir()
    assert run.main(["--config-dir", "mine", "-m", *SMALL, "seed=1,2"]) == 130
    (folder,) = Path("outputs").glob("*/*")
    assert {job.name for job in folder.glob("*/")} == {"seed=1"}
    assert read_json(folder / "seed=1/status.json")["state"] == "done"
    *_, count, rest = capsys.readouterr().out.splitlines()
    assert count == f"{folder}: 1 done, 1 never started"
    assert rest.startswith("the rest:  ")
    added = f"skip_done=true sweep={folder.relative_to('outputs')}"
    assert rest.endswith(f"seed=1,2 --config-dir mine {added}")


# -- in parallel


def test_local_jobs_are_what_they_are_alone_but_in_processes_of_their_own(capsys):
    assert run.main(["-m", *SMALL, LOCAL, "seed=1,2", "sweep=mine"]) == 0
    out = capsys.readouterr().out
    assert "2 done" in out
    assert re.findall(r"^\[\d/2\] ", out, re.MULTILINE) == ["[1/2] ", "[2/2] "]
    assert "] outputs/mine/seed=2: done" in out
    assert "outputs/mine/seed=2" in Path("outputs/mine/.output/seed=2.txt").read_text()
    assert states("mine") == {"seed=1": "done", "seed=2": "done"}
    manifests = [read_json(job / "manifest.json") for job in jobs("mine")]
    assert len({found["pid"] for found in manifests} | {os.getpid()}) == 3
    assert {found["sweep"] for found in manifests} == {"mine"}
    assert all(found["command"].endswith("seed=1,2 sweep=mine") for found in manifests)
    assert run.main([*SMALL, "seed=2", "hydra.run.dir=alone"]) == 0
    assert compare_records(Path("outputs/mine/seed=2"), Path("alone")) is None
    assert compare_weights(Path("outputs/mine/seed=2"), Path("alone")) is None


def test_a_local_job_whose_process_dies_is_a_failed_job_and_the_others_go_on(capsys):
    given = ("-m", *SMALL, LOCAL, DEADLY, "env.kwargs.kill=true,false", "sweep=mine")
    assert run.main([*given]) == 1
    killed = "env.kwargs.kill=True"
    assert states("mine") == {f"{killed},seed=1": "failed", "env.kwargs.kill=False,seed=1": "done"}
    error = read_json(Path(f"outputs/mine/{killed},seed=1/status.json"))["error"]
    assert error.startswith("JobDied: the job's process was killed by SIGKILL")
    captured = capsys.readouterr()
    assert "1 failed" in captured.out
    assert f"failed: outputs/mine/{killed},seed=1: JobDied" in captured.err


def test_a_local_job_that_dies_before_its_run_begins_is_a_failed_job(tmp_path, capsys):
    given = ("-m", *SMALL, LOCAL, "sweep=mine")
    assert run.main([*SMALL, "hydra.run.dir='outputs/mine/seed=1'"]) == 0
    (tmp_path / "deadly_plugin.py").write_text(
        "import multiprocessing, os\nif multiprocessing.parent_process(): os.kill(os.getpid(), 9)"
    )
    deadly = ("plugins=[deadly_plugin]", "replace_done=true")
    assert run.main([*given, "seed=1,2", *deadly]) == 1
    # A finished run does not give way to a failure that has no run.
    assert states("mine") == {"seed=1": "done", "seed=2": "failed"}
    assert not Path("outputs/mine/.earlier").exists()
    captured = capsys.readouterr()
    assert "outputs/mine: 1 never started, 1 failed" in captured.out
    assert "outputs/mine/seed=1: the job's process was killed by SIGKILL" in captured.err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_jobs_end_with_a_checkpoint_when_their_sweep_is_ended(signum):
    endless = (*SMALL, "total_frames=100_000_000", "seed=1,2", LOCAL, "sweep=mine")
    sweep = subprocess.Popen([sys.executable, str(ROOT / "run.py"), "-m", *endless])
    metrics = [Path(f"outputs/mine/seed={seed}/metrics.jsonl") for seed in (1, 2)]
    wait_until(lambda: all(file.exists() and file.stat().st_size for file in metrics), sweep)
    pids = [read_json(file.parent / "status.json")["pid"] for file in metrics]
    sweep.send_signal(signum)
    sweep.wait()
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])
    assert set(states("mine").values()) == {"interrupted"}
    assert all(list((file.parent / "checkpoints").iterdir()) for file in metrics)


def test_an_interrupted_job_goes_on_from_its_checkpoint_when_the_rest_is_done(capsys):
    given = ("-m", *SMALL, "total_frames=512", "checkpoint.every_frames=128", "seed=1,2")
    assert run.main([*given, "checkpoint.keep=9", "sweep=whole"]) == 0
    assert "2 jobs, 2 to run, 1 at a time\n" in capsys.readouterr().out
    given = (*given, "checkpoint.keep=9", "sweep=mine")
    assert run.main(given) == 0
    broken = Path("outputs/mine/seed=2")
    for file in sorted((broken / "checkpoints").iterdir())[2:]:
        file.unlink()
    (broken / "summary.json").unlink()
    write_json(broken / "status.json", {"state": "interrupted"})
    capsys.readouterr()
    assert run.main([*given, "skip_done=true"]) == 0
    out = capsys.readouterr().out
    assert "2 jobs, 1 done before, 1 to run, 1 at a time\n" in out
    assert "outputs/mine/seed=2 goes on from frame 256\n" in out
    assert compare_records(Path("outputs/whole/seed=2"), broken) is None
    assert not Path("outputs/mine/.earlier").exists()


def test_joblib_is_refused_where_jobs_have_workers():
    single = plan_run([*SMALL]).config
    check_launcher("joblib", single)
    several = plan_run([*SMALL, "collector=multi_sync"]).config
    with pytest.raises(ConfigError, match="no worker comes up; take hydra/launcher=local"):
        check_launcher("joblib", several)
    vector = plan_run([*SMALL, "env.vectorisation=async"]).config
    with pytest.raises(ConfigError, match=r"joblib env\.vectorisation=async: "):
        check_launcher("joblib", vector)


def test_a_sweep_that_cannot_write_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run.main(["-m", *SMALL, "seed=1,2", "hydra.sweep.dir=file/mine"]) == 2
    assert capsys.readouterr().err.startswith("lockstep: file/mine cannot be written: ")


def test_a_launcher_or_a_sweeper_whose_package_is_missing_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    Plugins.instance()  # which add their configs to the store
    monkeypatch.delitem(ConfigStore.instance().repo["hydra"]["launcher"], "submitit_slurm.yaml")
    assert run.main(["-m", *SMALL, SLURM, "seed=1,2"]) == 2
    error = capsys.readouterr().err
    how = f"install it with: pip install -e '{ROOT}[%s]'"
    assert f"needs hydra-submitit-launcher; {how % 'sweep'}" in error
    assert run.main(["-m", "experiment=ppo_search"]) == 2  # which chooses its sweeper itself
    assert f"needs optuna; {how % 'optuna'}" in capsys.readouterr().err


# -- a sweep whose jobs fail


@pytest.mark.parametrize(
    "launcher", [(), pytest.param((LOCAL, "hydra.launcher.parallel=1"), marks=pytest.mark.slow)]
)
def test_no_job_is_started_after_so_many_have_failed(launcher, capsys):
    varied = ("algo.learning_rate=1e30,1e-3,1e31,1e-2", "stop_after_failures=2", "sweep=mine")
    assert run.main(["-m", *SMALL, *launcher, *varied]) == 1
    assert sorted(states("mine").values()) == ["done", "failed", "failed"]
    assert not Path("outputs/mine/algo.learning_rate=0.01,seed=1").exists()
    out, err = capsys.readouterr()
    assert "failed: outputs/mine/" in err
    assert "2 failed" in out
    assert "1 never started" in out
    assert "stop_after_failures=2: no job was started after 2 failed" in out


def test_failures_are_counted_since_the_sweep_was_started(tmp_path):
    for name, state in {"a": "failed", "b": "done", "c": "failed"}.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "status.json", {"state": state})
    assert failures(tmp_path) == 2
    (tmp_path / "multirun.yaml").touch()
    for name, seconds in {"a": -1, "c": 1}.items():
        at = (tmp_path / "multirun.yaml").stat().st_mtime + seconds
        os.utime(tmp_path / name / "status.json", (at, at))
    assert failures(tmp_path) == 1


def test_a_limit_of_failures_is_a_positive_number(capsys):
    expected = ": expected a whole number (1 or more) or null"
    for value in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            build(CommandConfig, {"stop_after_failures": value})
    assert run.main(["-m", *SMALL, "seed=1,2", "stop_after_failures=x"]) == 2
    assert expected in capsys.readouterr().err


def test_jobs_are_composed_as_hydra_does_it_but_their_parts_only_once(monkeypatch):
    """Also where a job adds or deletes options, sets a whole mapping, or is refused."""
    jobs = [
        ["model=mlp", "seed=1", "algo.gamma=0.5"],
        ["model=mlp", "seed=2", "algo.gamma=${algo.learning_rate}", "name='a b'"],
        ["model=lstm", "seed=1", "+env.kwargs.x={y: [1, 2]}", "~env.kwargs.x"],
        ["seed=2", "model=lstm", "sync.link={mbps: 10}", "++model.lstm_size=8"],
        ["model=mlp", "algo.nothing=1"],
        ["model=mlp", "nothing@algo=1"],
        ["model=nothing", "seed=1"],
        ["model=mlp", "seed=1,2"],
    ]
    place, common = Place(), ["experiment=clip_lag", "hydra.job.chdir=false"]
    place.prepare(common)
    with place.opened():
        hydra = ConfigLoaderImpl(GlobalHydra.instance().config_loader().get_search_path())
        sweep = hydra.load_configuration("config", [*common, "seed=1,2"], RunMode.MULTIRUN)
        expected = [composed(hydra, sweep, job) for job in jobs]
        calls = []
        merge = ConfigLoaderImpl._compose_config_from_defaults_list
        monkeypatch.setattr(
            ConfigLoaderImpl,
            "_compose_config_from_defaults_list",
            lambda *given, **named: calls.append(1) or merge(*given, **named),
        )
        ours = JobLoader(hydra.get_search_path())
        for _ in range(2):
            assert [composed(ours, sweep, job) for job in jobs] == expected
    assert len(calls) == 2  # of mlp and of lstm


def composed(loader, sweep, job):
    """The config of a job, with what it has recorded of itself; or the error."""
    try:
        config = loader.load_sweep_config(sweep, job)
    except HydraException as error:
        return type(error), str(error)
    kept = OmegaConf.is_struct(config), OmegaConf.is_struct(config.hydra.job)
    return OmegaConf.to_yaml(config), OmegaConf.to_yaml(config, resolve=True), kept


# -- options that move together


def test_zipped_options_move_together():
    zipped = ("algo.learning_rate=${zip:1e-3,3e-4,1e-4}", "algo.epochs=${zip:1,2,3}")
    others = ("model.hidden_sizes=${zip:[8],[8,8],[16]}", "algo.max_lag=${zip:null,2,3}")
    assert run.main(["-m", *SMALL, *zipped, *others, "point=0,2", "sweep=mine"]) == 0
    assert states("mine") == {"point=0,seed=1": "done", "point=2,seed=1": "done"}
    options = [parse_yaml((job / "config.yaml").read_text()) for job in jobs("mine")]
    assert [found["algo"]["learning_rate"] for found in options] == [1e-3, 1e-4]
    assert [found["algo"]["epochs"] for found in options] == [1, 3]
    assert [found["algo"]["max_lag"] for found in options] == [None, 3]
    assert [found["model"]["hidden_sizes"] for found in options] == [[8], [16]]
    assert not any("point" in found for found in options)


def test_an_index_beyond_the_zipped_values_is_refused_before_the_first_job(capsys):
    assert run.main(["-m", *SMALL, "algo.epochs=${zip:1,2}", "point=0,1,2"]) == 2
    error = capsys.readouterr().err
    assert "algo.epochs: point=2: expected 0 to 1, as ${zip:...} has 2 values" in error
    assert len(error.splitlines()) == 1
    assert not Path("outputs").exists()


def test_a_config_file_may_zip_options():
    written = "point: 1\nrate: ${zip:1e-3,null}\nsizes: ${zip:8,[8,8]}\nname: ${zip:a,'b c'}"
    config = OmegaConf.to_container(OmegaConf.create(written), resolve=True)
    assert config == {"point": 1, "rate": None, "sizes": [8, 8], "name": "b c"}


# -- SLURM, without a cluster: programs of its names stand for it

SBATCH = """#!/bin/bash
# Runs the array here: each task as SLURM would start it.
cp "$1" script.sh
for task in 0 1; do
    SLURM_JOB_ID=4$task SLURM_ARRAY_JOB_ID=4 SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_COUNT=2 \\
    SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 \\
    bash "$1" > task-$task.txt 2>&1 < /dev/null &
done
echo Submitted batch job 4
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    [[ $1 == --output || $1 == --error ]] && shift
    shift
done
exec "$@"
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """A cluster's programs; the script that was submitted will be there."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    return tmp_path / "script.sh"


def test_slurm_gets_one_array_with_the_directives_of_the_config(slurm, capsys):
    wanted = (
        "hydra.launcher.name=lockstep",
        "hydra.launcher.timeout_min=240",
        "hydra.launcher.cpus_per_task=4",
        "hydra.launcher.mem_gb=8",
        "hydra.launcher.partition=gpu",
        "hydra.launcher.gpus_per_node=1",
        "hydra.launcher.array_parallelism=2",
        "hydra.launcher.setup=['module load cuda']",
        "++hydra.launcher.additional_parameters={mail-type:END}",
    )
    given = ("-m", *SMALL, SLURM, *wanted, "seed=1,2", "sweep=mine")
    assert run.main([*given]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^\[(\d/2)\] outputs/mine/seed=\d: done", out, re.MULTILINE) == [
        "1/2",
        "2/2",
    ]
    assert states("mine") == {"seed=1": "done", "seed=2": "done"}
    script = slurm.read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.MULTILINE))
    expected = {
        "array": "0-1%2",
        "cpus-per-task": "4",
        "gpus-per-node": "1",
        "job-name": "lockstep",
        "mail-type": "END",
        "mem": "8GB",
        "nodes": "1",
        "ntasks-per-node": "1",
        "partition": "gpu",
        "time": "240",
    }
    assert expected.items() <= directives.items()
    assert script.index("module load cuda") < script.index("srun")


# -- interrupted, and gone on with


def test_a_killed_sweep_that_is_gone_on_with_gives_the_table_of_one_never_killed(tmp_path):
    given = ("-m", *SMALL, "algo.learning_rate=1e-3,1e-2", "sweep=mine")
    sweep = Command(*given, folder=tmp_path / "killed")
    second = tmp_path / "killed/outputs/mine/algo.learning_rate=0.01,seed=1/metrics.jsonl"
    wait_until(second.exists, sweep)
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    os.chdir(tmp_path / "killed")
    names = [f"algo.learning_rate={rate},seed=1" for rate in (0.001, 0.01)]
    assert states("mine") == dict(zip(names, ("done", "running"), strict=True))
    assert run.main([*given, "skip_done=true"]) == 0
    (tmp_path / "whole").mkdir()
    os.chdir(tmp_path / "whole")
    assert run.main([*given]) == 0
    for folder in ("killed", "whole"):
        assert report([str(tmp_path / folder / "outputs/mine"), "--title", "both"]) == 0
    for table in ("results.csv", "comparisons.csv"):
        killed, whole = (
            (tmp_path / folder / "outputs/mine/report/data" / table).read_text()
            for folder in ("killed", "whole")
        )
        assert killed == whole
        assert len(whole.splitlines()) > 1


# -- apart from others


@pytest.mark.slow
def test_two_sweeps_in_one_process_give_the_bits_that_each_gives_in_its_own(tmp_path):
    first = ("-m", *SMALL, "seed=1,2", "sweep=first")
    second = (
        *("-m", *SMALL, "collector=multi_sync", "model=lstm", "num_threads=2", "sync.interval=1,2"),
        *("model.lstm_size=8", "model.sequence_length=4", "sweep=second"),
    )
    assert run.main([*first]) == 0
    assert run.main([*second]) == 0
    alone = [Command(*given, folder=tmp_path / "alone") for given in (first, second)]
    assert [process.wait() for process in alone] == [0, 0]
    for job in [*jobs("first"), *jobs("second")]:
        assert compare_records(job, tmp_path / "alone" / job) is None
        assert compare_weights(job, tmp_path / "alone" / job) is None
    assert len(jobs("first")) == len(jobs("second")) == 2


def test_a_run_puts_back_what_it_changes_of_its_process():
    threads = torch.get_num_threads()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with own_state(seed=5, num_threads=threads + 1):
        inside = random.random(), np.random.rand(), torch.rand(1).item()
        assert torch.get_num_threads() == threads + 1
    assert torch.get_num_threads() == threads
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert inside != expected


@pytest.mark.slow
def test_each_job_has_a_wandb_run_of_its_own_grouped_by_the_sweep(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ("-m", *SMALL, "logger=wandb", "seed=1,2", "sweep=mine")
    assert run.main([*given]) == 0
    assert wandb.run is None
    found = [
        next(r.run for r in wandb_file.read(job) if r.WhichOneof("record_type") == "run")
        for job in jobs("mine")
    ]
    assert len({named.run_id for named in found}) == 2
    assert {named.run_group for named in found} == {"mine"}
    assert {named.job_type for named in found} == {"shared_mem/single"}


# -- what a sweep is told before it starts


def test_a_sweep_over_an_interval_is_told_which_sweeper_draws_from_it(capsys):
    rates = "algo.learning_rate=interval(1e-4,1e-2)"
    assert run.main(["-m", *SMALL, rates]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lockstep: {rates}: ")
    assert "hydra/sweeper=optuna" in line


# -- sweeps that grow


def test_a_sweep_grows_and_a_finished_run_gives_way_only_if_that_is_asked_for(capsys):
    given = ("-m", *SMALL, "sync.lag=0,4", "sweep=mine")
    assert run.main(["-m", *SMALL, "algo.learning_rate=1e30", "sweep=mine"]) == 1
    assert run.main([*given, "seed=4"]) == 0
    first = Path("outputs/mine/seed=4,sync.lag=0")
    assert read_json(first / "manifest.json")["sweep"] == "mine"
    before = picture(first)
    capsys.readouterr()
    # Seeds are added: finished runs stay where they are, and the sweep tells of its own jobs.
    assert run.main([*given, "seed=4,5", "skip_done=true"]) == 0
    names = [f"seed={seed},sync.lag={lag}" for seed in (4, 5) for lag in (0, 4)]
    assert states("mine") == {"seed=1": "failed"} | dict.fromkeys(names, "done")
    assert picture(first) == before
    out = capsys.readouterr().out
    ended = re.findall(r"^\[(\d/4)\] outputs/mine/(\S+): done", out, re.MULTILINE)
    assert sorted(ended) == [("3/4", names[2]), ("4/4", names[3])]
    assert re.search(r"^\[3/4\] .*: done, \d+ s left$", out, re.MULTILINE)
    *_, count, following = out.splitlines()
    assert re.search(r"lag=4  +(lower|higher|no difference found|not tested|identical) ", out)
    assert count == "outputs/mine: 4 done"
    assert following.endswith(" report outputs/mine")
    assert "config\n" not in out
    # Where a finished run is in the way, the ways out are said.
    for other, kept in (((), "skip_done=true keeps it, "), (("algo.epochs=1",), "")):
        assert run.main([*given, "seed=4,6", *other]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"lockstep: {first} holds a finished run of ")
        assert f"config: {kept}replace_done=true moves it to .earlier/" in line
    assert picture(first) == before
    assert not Path("outputs/mine/.earlier").exists()
    assert not any("seed=6" in name for name in states("mine"))
    assert run.main([*given, "seed=4", "algo.epochs=1", "replace_done=true"]) == 0
    earlier = Path("outputs/mine/.earlier/seed=4,sync.lag=0-1/status.json")
    assert read_json(earlier)["state"] == "done"


def picture(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
