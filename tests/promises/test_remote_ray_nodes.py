"""Two Ray nodes on one machine, and one of them lost."""

from __future__ import annotations

import os

import pytest

from sync import RayWeightSyncScheme, WorkerDied
from tests.promises.ray_cluster import cluster, use_token_authentication
from tests.promises.remote_hosts import be_worker, held

ray = pytest.importorskip("ray", reason="ray is not installed")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Ray keeps workers while its nodes run; the end of them all is looked for in `nodes`."""


class Host:
    """A process for a worker."""


@pytest.fixture
def nodes():
    """A cluster of two, and the second node."""
    from ray.cluster_utils import Cluster

    use_token_authentication()
    os.environ["PYTHONPATH"] = os.getcwd()
    options = {"num_cpus": 2, "object_store_memory": 100_000_000}
    both = Cluster(initialize_head=True, head_node_args={**options, "resources": {"first": 1}})
    try:
        second = both.add_node(**options, resources={"second": 1})
        with cluster(address=both.address):
            yield both, second
    finally:
        both.shutdown()


def test_a_node_that_is_lost_is_named_and_the_other_goes_on(nodes):
    from sync.remote.ray import RayEngine
    from tests.promises.probe import VersionPolicy

    both, second = nodes
    remote = ray.remote(num_cpus=0, max_concurrency=4)(Host)
    actors = [remote.options(resources={place: 0.1}).remote() for place in ("first", "second")]
    engine, policy = RayEngine(actors), VersionPolicy()
    with RayWeightSyncScheme(timeout=60.0) as scheme:
        scheme.attach(engine)
        scheme.init_on_sender(model=policy, devices=["cpu", "cpu"])
        for worker in range(2):
            engine.call(worker, be_worker, scheme, worker).result(100.0)
        scheme.connect()
        policy.hold(1)
        scheme.send()
        assert [engine.call(worker, held).result(30.0) for worker in range(2)] == [(1, 1, 1)] * 2
        both.remove_node(second, allow_graceful=False)
        policy.hold(2)
        with pytest.raises(WorkerDied, match=r"worker 1 .*died: peer 1"):
            scheme.send()
        policy.hold(3)
        scheme.send(worker_ids=[0])
        assert engine.call(0, held).result(30.0) == (3, 3, 3)
