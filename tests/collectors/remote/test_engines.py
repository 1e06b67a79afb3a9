"""What is tested at length over torch.distributed, briefly over the others; and what is Ray's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from collectors.remote.ray_collector import _join_running
from sync import RayRemoteWeightUpdater
from tests.collectors.remote.support import RAY_IS_SLOW, make, needs_ray
from tests.collectors.support import all_accounted_for, same_bits
from tests.promises import probe
from tests.promises.collector_probe import VersionPolicy, make_cartpole
from tests.promises.remote_hosts import be_worker, held

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", params=RAY_IS_SLOW[1:])
def collector(request):
    """One host with two workers, which no test harms."""
    options = {"num_collectors": 1, "num_workers_per_collector": 2, "frames_per_batch": 160}
    with make(request.param, make_cartpole, VersionPolicy(), **options) as made:
        yield made


def test_weights_reach_the_workers_of_a_host_and_say_so(collector):
    for _ in range(2):
        version = collector.policy_version + 1
        collector.policy.hold(version)
        collector.update_policy_weights_()
        batch = collector.next()
        assert batch.batch_size == (4, 40)
        for key in ("low", "high", "policy_version"):
            assert (batch[key] == version).all()
        with collector.pause():
            assert all_accounted_for(collector.stats())


def without_numbers(batch):
    """The batch without the numbers of its trajectories, which are given out once."""
    return batch.exclude(("collector", "traj_ids"))


def test_a_seed_says_all_and_a_saved_state_goes_on_to_the_bit(collector):
    collector.set_seed(5)
    first = [collector.next() for _ in range(2)]
    state = collector.state_dict()
    goes_on = [collector.next() for _ in range(2)]
    assert collector.load_state_dict(state) is True
    assert collector.frames == state["frames"]
    for batch in goes_on:
        assert same_bits(collector.next(), batch)
    collector.set_seed(5)
    for batch in first:
        assert same_bits(without_numbers(collector.next()), without_numbers(batch))
    collector.set_seed(6)
    assert not torch.equal(collector.next()["observation"], first[0]["observation"])


# -- Ray


@pytest.fixture(scope="module")
def actors():
    """Two actors that ask for different amounts, and an updater that pushes to them."""
    updater = RayRemoteWeightUpdater(VersionPolicy())
    with make(
        "ray",
        make_cartpole,
        VersionPolicy(),
        frames_per_batch=200,
        weight_updater=updater,
        remote_configs=[{"num_cpus": 1}, {"num_cpus": 2}],
    ) as made:
        yield made, updater


def taken():
    """What the actor that this is called in takes of the cluster."""
    import ray

    return ray.get_runtime_context().get_assigned_resources()


@needs_ray
def test_each_ray_collector_takes_of_the_cluster_what_its_config_says(actors):
    call = actors[0].launcher.engine.call
    assert [call(host, taken).result(30.0) for host in (0, 1)] == [{"CPU": 1.0}, {"CPU": 2.0}]


@needs_ray
def test_an_updater_reaches_ray_collectors_when_it_is_their_turn(actors):
    collector, updater = actors
    assert updater.collector is collector
    found = []
    updater.max_interval = 1
    for number in range(1, 5):
        updater.policy_weights.hold(number)
        collector.update_policy_weights_()
        batch = collector.next()
        found.append([batch[key].unique().item() for key in ("low", "policy_version")])
    updater.max_interval = 0
    updater.policy_weights.hold(5)
    updater.update_weights()
    assert (collector.next()["low"] == 5).all()
    assert found == [[1, 1], [1, 1], [3, 2], [3, 2]]


@needs_ray
def test_an_updater_alone_pushes_to_the_actors_whose_turn_it_is(actors):
    engine = actors[0].launcher.engine
    handles = [engine._actors[host] for host in (0, 1)]
    updater = RayRemoteWeightUpdater(probe.VersionPolicy(), handles, max_interval=1)
    with updater.scheme as scheme:
        for worker in range(2):
            engine.call(worker, be_worker, scheme, worker).result(30.0)
        scheme.connect()
        found = []
        for number, chosen in enumerate([[1], None, None, None], start=1):
            updater.policy_weights.hold(number)
            updater.update_weights(worker_ids=chosen)
            found.append([engine.call(worker, held).result(30.0)[1] for worker in range(2)])
        with pytest.raises(
            ValueError, match="already has workers, but RayCollector creates its own"
        ):
            make("ray", make_cartpole, VersionPolicy(), weight_updater=updater)
    assert found == [[0, 1], [2, 1], [2, 3], [4, 3]]


@needs_ray
def test_ray_collectors_that_find_no_place_say_what_they_asked_for():
    with pytest.raises(TimeoutError) as raised:
        make(
            "ray",
            make_cartpole,
            VersionPolicy(),
            num_collectors=1,
            remote_configs={"resources": {"moon": 1}},
            start_timeout=0.5,
        )
    assert "Ray found no place for worker 0 within start_timeout=0.5 s" in str(raised.value)
    assert "each asks for {'resources': {'moon': 1}}" in str(raised.value)


@pytest.mark.parametrize("tries", [None, "7"])
def test_after_a_cluster_that_cannot_be_joined_the_environment_is_as_before(tries, monkeypatch):
    name = "RAY_gcs_server_port_wait_time_s"
    if tries is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, tries)
    with pytest.raises(ConnectionError, match="cannot join a Ray cluster at address="):
        _join_running({}, "127.0.0.1:1", timeout=30.0)
    assert os.environ.get(name) == tries


def address():
    """Of the cluster that this process is connected with."""
    import ray

    return ray.get_runtime_context().gcs_address


def start(program, *arguments, **environment):
    """A program in a process that is not connected with any cluster."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


def ended(process):
    try:
        out, err = process.communicate(timeout=100.0)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


JOINS = """
import sys
from tests.collectors.remote.support import make
from tests.promises.collector_probe import VersionPolicy, make_cartpole

import ray
from sync import WorkerDied

cluster = {"address": sys.argv[1]}
options = {"num_collectors": 1, "frames_per_batch": 20, "on_worker_failure": "restart"}
first = make("ray", make_cartpole, VersionPolicy(), **options, **cluster)
with make("ray", make_cartpole, VersionPolicy(), **options) as second:
    assert first.next().numel() == 20
    first.shutdown()
    assert second.next().numel() == 20
    print(ray.get_runtime_context().gcs_address)
assert not ray.is_initialized()

with make("ray", make_cartpole, VersionPolicy(), **options, **cluster) as left_alone:
    left_alone.next()
    ray.shutdown()
    for ask in (left_alone.next, left_alone.update_policy_weights_):
        try:
            ask()
        except WorkerDied as error:
            print(error)
assert not ray.is_initialized()
"""


@needs_ray
@pytest.mark.slow
def test_ray_collectors_join_a_cluster_that_runs_and_the_last_leaves_it_running(actors):
    status, out, err = ended(start(JOINS, address()))
    assert status == 0, err
    joined, *said = out.splitlines()
    assert joined == address()
    assert len(said) == 2
    assert all("is not connected to a Ray cluster any more" in line for line in said)
    assert actors[0].next().numel()


STARTS = """
import os, signal, threading, time
import psutil, ray
from tests.collectors.remote.support import make
from tests.promises.collector_probe import VersionPolicy, make_cartpole

class Stop(BaseException):
    pass

def stop(*_):
    raise Stop

def begin():
    made.append(make("ray", make_cartpole, VersionPolicy(), num_collectors=1, frames_per_batch=20))

signal.signal(signal.SIGTERM, stop)
init, made = ray.init, []

def init_and_be_interrupted(**options):
    ray.init = init
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    init(**options)

ray.init = init_and_be_interrupted
try:
    begin()
except Stop:
    print("stopped")
_, left = psutil.wait_procs(psutil.Process().children(recursive=True), 10.0)
print([process.cmdline() for process in left], ray.is_initialized())

thread = threading.Thread(target=begin)
thread.start()
thread.join()
with made[0] as collector:
    for _ in range(20):
        collector.next()
        time.sleep(0.05)
print(ray.is_initialized())
"""


@pytest.mark.slow
@needs_ray
def test_a_ray_cluster_ends_with_an_interrupted_start_and_outlives_the_thread_that_began_it():
    status, out, err = ended(start(STARTS, PYTHONUNBUFFERED="1"))
    assert status == 0, err
    assert out.splitlines() == ["stopped", "[] False", "False"]


STRANGER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("in")
"""
STRANGER_WITH_A_COLLECTOR = """
import sys
from tests.collectors.remote.support import make
from tests.promises.collector_probe import VersionPolicy, make_cartpole
make("ray", make_cartpole, VersionPolicy(), address=sys.argv[1], start_timeout=5.0)
"""


@needs_ray
def test_a_ray_cluster_lets_nobody_in_without_its_token():
    assert os.environ["RAY_AUTH_MODE"] == "token"
    few = {"RAY_gcs_server_port_wait_time_s": "1"}
    without = start(STRANGER, address(), RAY_AUTH_MODE="disabled", **few)
    wrong = start(STRANGER_WITH_A_COLLECTOR, address(), RAY_AUTH_TOKEN="0" * 64)
    for process in (without, wrong):
        status, out, err = ended(process)
        assert (status, out) == (1, ""), err
        assert "Authentication token is missing or incorrect" in err
    assert f"cannot join a Ray cluster at address='{address()}'" in err
