"""Promises 1 to 6 and 8 over Ray, RPC and torch.distributed."""

from __future__ import annotations

import gc
import os

import pytest

from sync import TransportBackend, WorkerDied, WorkerError, WorkerTimeout
from sync.remote.engine import PeerDied
from tests.collectors.remote.support import RAY_IS_SLOW
from tests.promises.behaviours import (
    WORKERS,
    a_hanging_worker_is_named_and_may_come_back,
    a_killed_worker_is_named,
    a_worker_that_cannot_apply_is_named,
    in_use,
    killed_workers_are_named_and_replaced,
    only_the_addressed_change,
    unread_versions_are_coalesced,
    unsent_changes_reach_nobody,
)
from tests.promises.coarse_probe import be_coarse, read_coarsely
from tests.promises.probe import (
    CALLS,
    SPOILED,
    STOP,
    VALUE,
    VersionPolicy,
    flood,
    holding,
    read,
    stop,
    take_part,
    wait_until,
)
from tests.promises.remote_probe import (
    SCHEMES,
    Peers,
    raise_what_only_it_knows,
    take_by_transport,
    trial,
)
from tests.promises.test_faults import read_and_break

LARGE = 512  # three layers of it make 3.1 MB
MECHANISMS = {"distributed": "gloo", "rpc": "rpc", "ray": "ray object store"}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Peers outlive a test here, and Ray keeps workers; `Peers.close` looks for what is left."""


@pytest.fixture(scope="module")
def ray_cluster():
    pytest.importorskip("ray", reason="ray is not installed")
    from tests.promises.ray_cluster import cluster

    with cluster() as address:
        yield address


@pytest.fixture(scope="module", params=RAY_IS_SLOW)
def kind(request):
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.fixture(scope="module")
def peers(kind):
    """Peers that no test harms."""
    group = Peers(kind, WORKERS)
    yield group
    group.close()


@pytest.fixture(scope="module")
def mortal(kind, peers):
    """Peers for a test that kills some: the same, made whole again before each."""

    def whole():
        for peer, process in enumerate(peers.running):
            if kind != "ray" and peers.engine.gone(peer) is not None:
                wait_until(lambda process=process: not process.is_alive())  # its sockets end first
            if not process.is_alive():
                wait_until(lambda peer=peer: peers.engine.gone(peer) is not None or kind == "ray")
                if kind == "rpc":  # which cannot replace one
                    peers.close()
                    peers.open()
                    break
                peers.replace(peer)
        return peers

    yield whole
    whole()


def test_a_transport_brings_weights_by_its_four_calls(kind, peers):
    scheme, policy = SCHEMES[kind](timeout=30.0), VersionPolicy()
    scheme.attach(peers.engine)
    scheme.init_on_sender(model=policy, devices=["cpu"])
    transport = scheme.create_transport()
    assert isinstance(transport, TransportBackend)
    with scheme:
        taken = peers.engine.call(0, take_by_transport, transport, 3)
        transport.setup_connection_and_weights_on_sender()  # brings what the policy holds
        for version in (1, 2):
            policy.hold(version)
            transport.send_weights(policy)
        assert taken.result(30.0) == [0.0, 1.0, 2.0]


def test_a_peer_whose_error_cannot_be_read_here_is_not_dead(peers):
    with pytest.raises(Exception, match="lockstep_only_there") as raised:
        peers.engine.call(0, raise_what_only_it_knows).result(30.0)
    assert not isinstance(raised.value, PeerDied)
    assert peers.engine.gone(0) is None


def test_a_transport_whose_worker_does_not_come_says_so_in_time(kind, peers):
    scheme = SCHEMES[kind](timeout=0.2, connect_timeout=0.2)
    scheme.attach(peers.engine)
    scheme.init_on_sender(model=VersionPolicy(), devices=["cpu"])
    with scheme, pytest.raises(WorkerTimeout, match=r"worker 0 .* did not connect within 0\.2 s"):
        scheme.create_transport().setup_connection_and_weights_on_sender()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("width", "background"),
    [
        (64, True),
        (LARGE, False),
        pytest.param(64, False, marks=SLOW),
        pytest.param(LARGE, True, marks=SLOW),
    ],
)
def test_a_flood_is_whole_and_a_change_without_a_send_reaches_nobody(
    peers, tmp_path, width, background
):
    with trial(peers, tmp_path, width=width, background=background) as running:
        flood(running, calls=2_000 if width < LARGE else 200, versions=60)
        running.publish(wait=True)
        unsent_changes_reach_nobody(running)
        assert running.findings.violations() == {}


@pytest.mark.parametrize(("wire", "background"), [("bfloat16", False), ("int8", True)])
def test_no_call_of_encoded_weights_is_torn(peers, tmp_path, wire, background):
    target = read_coarsely if wire == "int8" else read
    options = {"wire": wire, "target": target, "background": background}
    with trial(peers, tmp_path, width=LARGE, **options) as running:
        if wire == "int8":
            be_coarse(running.policy)
        flood(running, calls=200, versions=40)
        assert running.findings.violations() == {}


@pytest.mark.parametrize("kind", RAY_IS_SLOW[-1:], indirect=True)
@pytest.mark.parametrize(
    ("width", "num_peers", "stored"),
    [(64, 3, False), (170, 3, False), (170, 30, True), (LARGE, 3, True)],
)
def test_small_versions_go_past_rays_store(peers, tmp_path, monkeypatch, width, num_peers, stored):
    import ray

    with trial(peers, tmp_path, width=width) as running:
        put, seen = ray.put, []
        monkeypatch.setattr(ray, "put", lambda block: seen.append(block) or put(block))
        monkeypatch.setattr(type(peers.engine), "num_peers", num_peers)
        flood(running, calls=200, versions=20)
        assert bool(seen) == stored
        assert running.findings.violations() == {}


def test_only_the_addressed_workers_change(peers, tmp_path):
    with trial(peers, tmp_path) as running:
        expected = only_the_addressed_change(running)
        running.scheme.send({0: holding(100), 2: holding(102)})  # each its own
        running.calls_from_now(5)
        assert in_use(running) == [100, expected[1], 102]


@pytest.mark.parametrize("width", [64, LARGE])
def test_blocking_sends_are_in_use_when_they_return_and_go_by_the_mechanism_of_the_name(
    peers, kind, tmp_path, width
):
    mechanism = MECHANISMS[kind] if (kind, width) != ("ray", 64) else "ray task"
    with trial(peers, tmp_path, width=width) as running:
        for _ in range(20):
            version = running.publish(wait=True)
            assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), version)
        stats = running.scheme.stats
        moved = {"versions": 21 * WORKERS, "bytes": stats["bytes"] * WORKERS}
        assert stats["moved"] == {mechanism: moved}
        assert stats["sends"] == 21
        assert stats["publish_ms"]["p50"] > 0
        for worker in range(WORKERS):
            of = stats["workers"][worker]
            assert (of["addressed"], of["applied"], of["coalesced"]) == (21, 21, 0)
            assert 0 < of["apply_ms"]["p50"] <= of["ack_ms"]["p50"]


def test_unread_versions_are_coalesced_and_cost_no_memory(peers, tmp_path):
    with trial(peers, tmp_path, width=128) as running:
        unread_versions_are_coalesced(running, sends=300)


def test_a_worker_that_cannot_apply_is_named_with_its_traceback(peers, tmp_path):
    message = "'body.0.weight' has shape [3, 3], expected [64, 64]"
    with trial(peers, tmp_path, target=read_and_break) as running:
        a_worker_that_cannot_apply_is_named(running, 2, message)


def test_a_hanging_worker_is_named_when_time_is_over_and_may_come_back(peers, tmp_path):
    with trial(peers, tmp_path, timeout=1.0) as running:
        a_hanging_worker_is_named_and_may_come_back(running)


def never_connects(scheme, worker, findings, *_):
    wait_until(lambda: bool(findings.get(worker, 6)))


def cannot_take_it(scheme, worker, *_):
    scheme.init_on_receiver(model=VersionPolicy(width=3), worker_idx=worker)
    try:
        scheme.connect()
    except ValueError:
        scheme.shutdown()


def test_a_rendezvous_that_cannot_complete_says_who_did_what(peers, tmp_path):
    with (
        pytest.raises(WorkerError, match=r"worker 1 .*did not connect within 0\.5 s: does peer 1"),
        trial(peers, tmp_path, connect_timeout=0.5, target=never_connects),
    ):
        pass


def test_another_layout_of_the_model_on_a_peer_is_named(peers, tmp_path):
    with (
        pytest.raises(WorkerError, match=r"'body.0.weight' has shape \[3, 3\]"),
        trial(peers, tmp_path, target=cannot_take_it),
    ):
        pass


def read_or_write(scheme, worker, findings, width, background=False):
    """Worker 0 has a policy that writes to its own weights, once told to, whenever it is called."""
    if worker:
        return read(scheme, worker, findings, width, background)
    policy = take_part(scheme, worker, VersionPolicy(width))
    while not findings.get(worker, STOP):
        scheme.receive()
        if findings.get(worker, SPOILED):
            policy.hold(1_000_000)
        findings.add(worker, CALLS)
    scheme.shutdown()


@pytest.mark.parametrize("width", [170, LARGE])
def test_a_worker_that_writes_to_its_parameters_harms_only_itself(peers, tmp_path, width):
    with trial(peers, tmp_path, width=width, target=read_or_write) as running:
        running.findings.set(0, SPOILED, 1)
        for _ in range(5):
            version = running.publish(wait=True)
            running.calls_from_now(5)
            assert [running.findings.get(w, VALUE) for w in (1, 2)] == [version] * 2
        assert running.processes[0].is_alive()
        assert running.findings.violations() == {}


def test_a_killed_worker_is_named_and_another_takes_its_place(kind, mortal, tmp_path):
    def replace(running, worker):
        peers.replace(worker)
        running.begin(worker)

    peers = mortal()
    with trial(peers, tmp_path) as running:
        died = r"worker 1 \(cpu, CartPole-v1\) died: peer 1"
        if kind == "rpc":
            a_killed_worker_is_named(running, died)
        else:
            killed_workers_are_named_and_replaced(running, replace, died)


def test_a_worker_killed_while_the_trainer_waits_for_it_ends_the_wait(mortal, tmp_path):
    peers = mortal()
    with trial(peers, tmp_path) as running:
        victim = running.processes[2]
        stop(victim.pid)  # so that the send cannot be answered
        running.publish()
        victim.kill()
        with pytest.raises(WorkerDied, match="worker 2"):
            running.scheme.wait_async(30.0)


def test_shutdown_leaves_no_thread_and_no_descriptor(mortal, tmp_path):
    peers = mortal()

    def count():
        gc.collect()  # what only a reference cycle still holds is not left behind
        return len(os.listdir("/proc/self/fd"))

    with trial(peers, tmp_path) as running:
        flood(running, calls=100, versions=10)
    before = count()
    for _ in range(5):
        with trial(peers, tmp_path) as running:
            flood(running, calls=100, versions=10)
            assert running.findings.total(CALLS) >= 100
    del running
    wait_until(lambda: count() <= before + 4)  # the engine's own, which it takes when it needs them
