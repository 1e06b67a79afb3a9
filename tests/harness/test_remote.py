"""Hosts elsewhere, from the command line: what is refused, what runs, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import run
from harness.config.stored import read_options
from harness.errors import ConfigError, ImpossiblePair
from harness.files import read_json
from harness.options.base import build
from harness.options.collectors import RayCollectorConfig, RPCCollectorConfig
from harness.run.checkpoints import Checkpoints
from harness.run_comparison import compare_records, compare_weights
from tests.collectors.remote.support import EACH
from tests.harness.config.composed import config_of, error_of
from tests.harness.config.experiments import jobs_of_experiment
from tests.harness.test_interruption import ROOT, running, wait_until
from tests.harness.test_run import SMALL, start


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Runs write to a fresh folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def of(kind: str) -> tuple[str, str]:
    return f"collector={kind}", f"sync={kind}"


# -- what is refused


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("collector=rpc",), "use sync=rpc"),
        (("collector=rpc", "sync=distributed"), "use sync=rpc"),
        (
            ("sync=ray",),
            "the collector's workers are on this machine; use sync=shared_mem, or collector=ray",
        ),
        (("collector.remote.port=3",), "it is one of collector=distributed, collector=rpc"),
        (
            (*of("rpc"), "collector.remote.num_cpus=3"),
            "it is one of collector=ray",
        ),
        ((*of("rpc"), "collector.remote.port=70000"), "expected a whole number (0 to 65535)"),
        ((*of("rpc"), "collector.remote.launcher=slurm"), "expected one of local, env"),
        ((*of("rpc"), "collector.remote.launcher=env"), "start it with torchrun"),
        (
            (*of("rpc"), "collector.remote.num_collectors=2"),
            "there is no such option; each worker is a process of its own: set "
            "collector.num_workers",
        ),
        ((*of("rpc"), "collector.preemptive_threshold=0.5"), "it is one of collector=multi_sync"),
        (
            (*of("rpc"), "collector.frames_per_batch=100"),
            "cannot be divided among 2 workers with 8",
        ),
        ((*of("rpc"), "collector.devices.policy=[cpu,cpu,cpu]"), "3 devices for 2 workers"),
        (
            (*of("rpc"), "collector.on_worker_failure=restart"),
            "torch's RPC cannot replace a process that died; use collector=distributed",
        ),
    ],
)
def test_what_cannot_work_between_machines_is_refused_with_a_reason(overrides, reason):
    assert reason in error_of(*overrides)


def test_a_missing_ray_is_named_with_the_command_that_installs_it(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    how = f"install it with: pip install -e '{ROOT}[ray]'"
    assert f"collector=ray needs ray; {how}" in error_of(*of("ray"), "env=cartpole")


def test_the_collectors_ablation_leaves_out_what_cannot_go_together():
    chosen = ("seed=1", "sync=shared_mem,rpc", "collector=multi_sync,rpc")
    taken = []
    for job in jobs_of_experiment("collector_ablation", *chosen):
        with contextlib.suppress(ImpossiblePair):
            config = config_of(*job)
            taken.append((config.sync.name, config.collector.name))
    assert taken == [("shared_mem", "multi_sync"), ("rpc", "rpc")]


def test_each_rank_but_the_trainers_is_a_worker(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = config_of(*of("distributed"), "collector.frames_per_batch=960")
    assert config.collector.num_workers == 3
    error = error_of(*of("distributed"), "collector.num_workers=4")
    assert "WORLD_SIZE=4, so there are 3 workers, not 4: omit collector.num_workers" in error


def test_an_actor_reserves_the_cpus_of_one_worker():
    options = build(
        RayCollectorConfig, {"num_workers": 6, "remote": {"num_cpus": 0.5}}, "collector"
    )
    config = SimpleNamespace(algo=SimpleNamespace(random_frames=0))
    assert options.arguments(config)["remote_configs"]["num_cpus"] == 0.5


def test_a_stored_run_without_a_number_of_collectors_can_be_read_and_another_is_refused(tmp_path):
    for value, is_refused in (("null", False), ("2", True)):
        text = f"collector: {{name: rpc, remote: {{num_collectors: {value}}}}}"
        (tmp_path / "config.yaml").write_text(text)
        remote = read_options(tmp_path)["collector"]["remote"]
        assert ("num_collectors" in remote) == is_refused
    with pytest.raises(ConfigError, match=r"=2: there is no such option; .* collector.num_workers"):
        build(RPCCollectorConfig, {"remote": remote}, "collector")


def test_devices_of_hosts_are_not_looked_for_here():
    config = config_of(*of("rpc"), "collector.devices.policy=[cuda:0,cuda:7]")
    assert config.collector.devices.policy == ["cuda:0", "cuda:7"]


@pytest.mark.parametrize("kind", ["distributed", "rpc"])
@pytest.mark.parametrize(("machines", "each"), [(3, 8), (5, 16)])
def test_the_ranks_of_the_pages_examples_are_as_many_workers(kind, machines, each, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(machines * each))
    config = config_of(*of(kind), f"collector.frames_per_batch={(machines * each - 1) * 64}")
    assert config.collector.num_workers == machines * each - 1
    page = (ROOT / "docs/cluster.md").read_text()
    assert f"collector.frames_per_batch={(machines * each - 1) * 64}" in page


# -- what runs


@pytest.mark.parametrize("kind", EACH)
def test_a_short_run_has_what_every_run_has_and_the_bits_of_a_run_of_one_machine(kind, capfd):
    status, directory = start(*SMALL, *of(kind))
    assert status == 0
    if kind == "distributed":
        line = "gloo, 2 workers on this machine, float32, added lag 0"
        assert f"sync: {line}\n" in capfd.readouterr().out
    summary = read_json(directory / "summary.json")
    assert summary["frames"] == 384
    assert set(summary["workers"]) == {"0", "1"}
    assert summary["collector/collected"] == summary["collector/delivered"] == 384
    assert {"sync/publish_ms_p50", "sync/ack_ms_p50", "policy/lag_mean"} <= set(summary)
    assert len(Checkpoints(directory / "checkpoints").files()) == 1
    if kind == "ray":  # it was not connected with a cluster before, and started one
        assert not sys.modules["ray"].is_initialized()
    _, local = start(*SMALL, "collector=multi_sync", "sync=shared_mem", into="local")
    assert compare_records(local, directory, replayed=True) is None
    assert compare_weights(local, directory) is None


def test_ctrl_c_ends_a_run_and_its_hosts(tmp_path):
    directory = tmp_path / "run"
    with running(directory, *of("distributed")) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        wait_until(lambda: not any(child.is_running() for child in children))
    assert read_json(directory / "status.json")["state"] == "interrupted"
    assert Checkpoints(directory / "checkpoints").files()


def test_ranks_of_torchrun_serve_the_first():
    torchrun = Path(sys.executable).with_name("torchrun")
    options = [*SMALL, *of("distributed"), "hydra.run.dir=ranks"]
    command = [torchrun, "--standalone", "--nproc-per-node", "3", ROOT / "run.py", *options]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert read_json(Path("ranks/status.json"))["state"] == "done"
    assert read_json(Path("ranks/summary.json"))["frames"] == 384
    assert os.listdir() == ["ranks"]  # the others write nothing


@pytest.mark.slow
def test_a_torchrun_on_each_machine_as_the_page_on_clusters_has_it():
    torchrun = Path(sys.executable).with_name("torchrun")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    place += ["--master-port", port]
    options = [*SMALL, *of("distributed"), "hydra.run.dir=ranks"]
    machines = [
        subprocess.Popen(
            [torchrun, *place, "--node-rank", rank, ROOT / "run.py", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in "01"
    ]
    try:
        for machine in machines:
            _, errors = machine.communicate(timeout=110)
            assert machine.returncode == 0, errors
    finally:
        for machine in machines:
            machine.kill()
    assert read_json(Path("ranks/status.json"))["state"] == "done"
    assert os.listdir() == ["ranks"]


@pytest.mark.parametrize("kind", ["distributed", "rpc"])
def test_a_rank_that_meets_no_trainer_says_so_in_one_line(monkeypatch, capfd, kind):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which it has its process ignore
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    options = ("collector.num_workers=1", "collector.remote.start_timeout_s=0.1")
    assert run.main([*SMALL, *of(kind), *options]) == 1
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("lockstep: peer 0: no trainer answered at 127.0.0.1:1 within 0.1 s")
