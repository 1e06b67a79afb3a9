"""Two Ray nodes on one machine, and one of them lost."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from collectors import RayCollector
from sync import RayWeightSyncScheme, WorkerDied
from tests.collectors.support import all_accounted_for
from tests.collectors.troubled import Plain, Troubled, is_gone, told, wait_until
from tests.promises.ray_cluster import cluster, use_token_authentication
from tests.promises.remote_hosts import be_worker, held
from tests.promises.remote_probe import RAY_START_S

ray = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.slow  # a cluster of two nodes takes a minute to start on two cores


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Ray keeps workers while its nodes run; the end of them all is looked for in `nodes`."""


class Host:
    """A process for a worker."""


OPTIONS = {"num_cpus": 8, "object_store_memory": 100_000_000}


@pytest.fixture(scope="module")
def first():
    """A cluster of one node."""
    from ray.cluster_utils import Cluster

    use_token_authentication()
    os.environ["PYTHONPATH"] = os.getcwd()
    both = Cluster(initialize_head=True, head_node_args={**OPTIONS, "resources": {"first": 1}})
    try:
        with cluster(address=both.address):
            yield both
    finally:
        both.shutdown()


@pytest.fixture
def nodes(first):
    """A cluster of two, and the second node, which a test may take away."""
    return first, first.add_node(**OPTIONS, resources={"second": 1})


def test_collectors_are_spread_over_the_nodes(nodes):
    both, second = nodes
    with RayCollector(Troubled, Plain(), num_collectors=2, frames_per_batch=40) as collector:
        assert collector.next().numel() == 40
        where = {collector.launcher.engine.call(host, node).result(30.0) for host in (0, 1)}
        assert len(where) == 2
    both.remove_node(second)  # Ray hears of it, so that it puts nothing there any more


def test_a_node_that_is_lost_is_named_and_the_other_goes_on(nodes):
    from sync.remote.ray_engine import RayEngine
    from tests.promises.probe import VersionPolicy

    both, second = nodes
    remote = ray.remote(num_cpus=0, max_concurrency=4)(Host)
    actors = [remote.options(resources={place: 0.1}).remote() for place in ("first", "second")]
    engine, policy = RayEngine(actors), VersionPolicy()
    with RayWeightSyncScheme(timeout=60.0) as scheme:
        scheme.attach(engine)
        scheme.init_on_sender(model=policy, devices=["cpu", "cpu"])
        for worker in range(2):
            engine.call(worker, be_worker, scheme, worker).result(RAY_START_S)
        scheme.connect()
        policy.hold(1)
        scheme.send()
        assert [engine.call(worker, held).result(30.0) for worker in range(2)] == [(1, 1, 1)] * 2
        lost = engine.call(1, os.getpid).result(30.0)
        both.remove_node(second, allow_graceful=False)
        wait_until(lambda: is_gone(lost))  # its processes notice, and may still answer till then
        policy.hold(2)
        with pytest.raises(WorkerDied, match=r"worker 1 .*died: peer 1"):
            scheme.send()
        policy.hold(3)
        scheme.send(worker_ids=[0])
        assert engine.call(0, held).result(30.0) == (3, 3, 3)


def test_a_collector_on_a_lost_node_is_started_elsewhere_and_its_loss_is_counted(nodes, tmp_path):
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    both, second = nodes
    places = [both.head_node, second]
    hang = {"only": 1, "where": "step", "what": "hang", "at": 15, "once": str(tmp_path / "once")}
    with (
        RayCollector(
            Troubled,
            Plain(),
            num_collectors=2,
            create_env_kwargs=told(2, **hang),
            frames_per_batch=40,
            on_worker_failure="restart",
            timeout=60.0,
            remote_configs=[
                {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=True)}
                for node in places
            ],
        ) as collector,
        ThreadPoolExecutor() as pool,
    ):
        assert [collector.launcher.engine.call(host, node).result(30.0) for host in (0, 1)] == [
            place.node_id for place in places
        ]
        batch = pool.submit(collector.next)
        wait_until(lambda: collector.stats()["workers"][1]["in_flight"] == 14)
        both.remove_node(second, allow_graceful=False)
        assert batch.result(100.0)["collector", "worker"][:, 0].tolist() == [0, 1]
        assert collector.launcher.engine.call(1, node).result(30.0) == both.head_node.node_id
        stats = collector.stats()
        assert stats["restarts"] == 1
        assert stats["dropped"] == 14
        assert all_accounted_for(stats)


def node():
    """Where the actor is that this is called in."""
    return ray.get_runtime_context().get_node_id()
