"""Nodes that pass versions on keep the promises: whatever happens to one harms no other."""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from sync import WorkerDied, WorkerTimeout
from sync.remote import gloo, tree
from tests.promises.probe import CALLS, STOP, VALUE, VERSION, call, stop, take_part, wait_until
from tests.promises.probe import VersionPolicy as Policy
from tests.promises.remote_probe import Peers, trial
from tests.security.sockets import listeners

# With a fan-out of 2, worker 0 serves 2 and 3, worker 1 serves 4 and 5, worker 2 serves 6 and 7,
# and worker 3 serves 8: workers 6 to 8 are reached through two others.
WORKERS = 9
FAN_OUT = 2
ABOVE = {worker: worker // FAN_OUT - 1 if worker >= FAN_OUT else None for worker in range(WORKERS)}
INNER, BELOW = 2, (6, 7)
OTHERS = [worker for worker in range(WORKERS) if worker != INNER]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Peers outlive a test here, and Ray keeps workers; `Peers.close` looks for what is left."""


@pytest.fixture(autouse=True)
def small_fan_out(monkeypatch):
    monkeypatch.setattr(tree, "FAN_OUT", FAN_OUT)


@pytest.fixture(scope="module")
def group():
    peers = Peers("distributed", WORKERS)
    yield peers
    peers.close()


@pytest.fixture
def peers(group):
    """All of them alive: what an earlier test has killed is replaced."""
    for peer, process in enumerate(group.running):
        if not process.is_alive():
            wait_until(lambda peer=peer: group.engine.gone(peer) is not None)
            group.replace(peer)
    return group


def read_now_and_then(scheme, worker, findings, width, background):
    """A worker that makes a policy call with each version, and otherwise leaves the cores alone."""
    policy = take_part(scheme, worker, Policy(width))
    while not findings.get(worker, STOP):
        scheme.receive(timeout=0.05)
        call(scheme, policy, worker, findings, False)
    scheme.shutdown()


@contextmanager
def workers_of(peers, tmp_path, **options):
    with trial(peers, tmp_path, target=read_now_and_then, **options) as running:
        yield running
        assert running.findings.violations() == {}


def relays(running):
    """By worker, who passed the newest version on to it."""
    return {w: one["relay"] for w, one in running.scheme.stats["workers"].items()}


def until_the_tree_is(running, expected):
    """Publish until the versions take this way: nodes are connected while others run."""

    def is_so():
        running.publish(wait=True)
        return relays(running) == expected

    wait_until(is_so)


def use(running, workers, version):
    """Whether these workers compute with this version."""
    return all(
        running.findings.get(worker, field) == version
        for worker in workers
        for field in (VALUE, VERSION)
    )


def test_versions_arrive_whole_and_rightly_stamped_through_others(peers, tmp_path):
    with workers_of(peers, tmp_path, width=170) as running:
        until_the_tree_is(running, ABOVE)
        for _ in range(10):
            version = running.publish(wait=True)
            assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), version)
            assert relays(running) == ABOVE
        wait_until(lambda: use(running, range(WORKERS), version))
        moved = list(running.scheme.stats["moved"].values())
        assert sum(one["versions"] for one in moved) == WORKERS * (version + 1)


def test_nodes_listen_for_each_other_on_loopback_alone(peers, tmp_path):
    with workers_of(peers, tmp_path) as running:
        until_the_tree_is(running, ABOVE)
        found = set.union(*(listeners(process.pid) for process in running.processes))
        assert found
        assert {one for one in found if not one.is_loopback} == set()


def test_a_flood_of_versions_leaves_every_worker_with_the_newest(peers, tmp_path):
    with workers_of(peers, tmp_path, width=170) as running:
        until_the_tree_is(running, ABOVE)
        begun = running.findings.total(CALLS)
        version = 0
        while running.findings.total(CALLS) < begun + 200:
            version = running.publish()
            time.sleep(0.002)
        running.scheme.wait_async()
        assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), version)
        wait_until(lambda: use(running, range(WORKERS), version))


def test_only_the_addressed_workers_change(peers, tmp_path):
    with workers_of(peers, tmp_path) as running:
        until_the_tree_is(running, ABOVE)
        expected = dict.fromkeys(range(WORKERS), running.scheme.version)
        for chosen in ([8], [2, 6], [0, 2, 7], [3, 6, 8], [0, 1], list(range(WORKERS))):
            version = running.publish(wait=True, worker_ids=chosen)
            expected |= dict.fromkeys(chosen, version)
            assert running.scheme.acknowledged == expected
            passed_on = {w: ABOVE[w] if ABOVE[w] in chosen else None for w in chosen}
            assert {w: relays(running)[w] for w in chosen} == passed_on
            running.calls_from_now(2)
            found = {w: running.findings.get(w, VALUE) for w in range(WORKERS)}
            assert found == expected


def test_a_killed_inner_node_is_named_alone_and_another_takes_its_place(peers, tmp_path):
    with workers_of(peers, tmp_path) as running:
        until_the_tree_is(running, ABOVE)
        running.processes[INNER].kill()
        with pytest.raises(WorkerDied, match=f"worker {INNER} .*died") as raised:
            running.publish(wait=True)
        assert list(raised.value.failures) == [INNER]
        version = running.publish(wait=True, worker_ids=OTHERS)
        assert {w: relays(running)[w] for w in BELOW} == dict.fromkeys(BELOW)
        wait_until(lambda: use(running, OTHERS, version))
        wait_until(lambda: not running.processes[INNER].is_alive())  # its connections end first
        running.findings.set(INNER, VERSION, 0)
        peers.replace(INNER)
        running.begin(INNER)
        running.scheme.connect(worker_idx=INNER)
        until_the_tree_is(running, ABOVE)
        assert running.scheme.stats["workers"][INNER]["restarts"] == 1


def test_an_inner_node_killed_with_a_version_in_its_hands_loses_it_for_nobody(peers, tmp_path):
    with workers_of(peers, tmp_path) as running:
        until_the_tree_is(running, ABOVE)
        victim = running.processes[INNER]
        stop(victim.pid)
        version = running.publish()  # it is on its way to this one, which cannot pass it on
        victim.kill()
        with pytest.raises(WorkerDied, match=f"worker {INNER} ") as raised:
            running.scheme.wait_async(30.0)
        assert list(raised.value.failures) == [INNER]
        assert {running.scheme.acknowledged[w] for w in OTHERS} == {version}


def test_a_silent_inner_node_is_named_alone_and_goes_on_later(peers, tmp_path):
    with workers_of(peers, tmp_path, timeout=8.0) as running:
        until_the_tree_is(running, ABOVE)
        stop(running.processes[INNER].pid)
        with pytest.raises(WorkerTimeout, match=f"worker {INNER} ") as raised:
            running.publish(wait=True)
        assert list(raised.value.failures) == [INNER]
        begun = time.monotonic()
        for _ in range(3):  # those below are served at once from now on
            version = running.publish(wait=True, worker_ids=OTHERS)
        assert time.monotonic() - begun < 8.0
        wait_until(lambda: use(running, OTHERS, version))
        running.processes[INNER].kill(signal.SIGCONT)
        running.scheme.wait_async(30.0)
        until_the_tree_is(running, ABOVE)


def test_a_hanging_leaf_holds_back_nobody(peers, tmp_path):
    leaf = WORKERS - 1
    others = list(range(leaf))
    with workers_of(peers, tmp_path) as running:
        until_the_tree_is(running, ABOVE)
        stop(running.processes[leaf].pid)
        begun = time.monotonic()
        for _ in range(5):
            version = running.publish()
            running.scheme.wait_async(worker_ids=others)
            assert {running.scheme.acknowledged[w] for w in others} == {version}
        assert time.monotonic() - begun < 10.0
        assert {w: relays(running)[w] for w in others} == {w: ABOVE[w] for w in others}
        running.processes[leaf].kill(signal.SIGCONT)
        running.scheme.wait_async(30.0)
        wait_until(lambda: use(running, range(WORKERS), version))


class Broken:
    """In the place of a node's connection with another."""

    def __init__(self, post):
        self.post = post

    def close(self):
        """There is nothing to close."""


def lose_what_is_sent(port, peer, other):
    """From now on nothing that this node sends to the other arrives, and nothing says so."""
    gloo._served[port, peer].others[other] = Broken(lambda *args: Future())


def refuse_what_is_sent(port, peer, other):
    """From now on this node's engine says that the other cannot be reached."""

    def refuse(*args):
        raise ConnectionError("the cable was pulled")

    gloo._served[port, peer].others[other] = Broken(refuse)


@pytest.mark.parametrize(
    "cut", [lose_what_is_sent, pytest.param(refuse_what_is_sent, marks=pytest.mark.slow)]
)
def test_nobody_counts_as_dead_whose_relay_cannot_reach_it(peers, tmp_path, cut):
    with workers_of(peers, tmp_path) as running:
        until_the_tree_is(running, ABOVE)
        peers.engine.call(ABOVE[INNER], cut, peers.engine.port, ABOVE[INNER], INNER).result(20.0)
        version = running.publish(wait=True)
        assert running.scheme.acknowledged == dict.fromkeys(range(WORKERS), version)
        version = running.publish(wait=True)  # from the trainer, and on from there
        assert relays(running) == {**ABOVE, INNER: None}
        wait_until(lambda: use(running, range(WORKERS), version))
        until_the_tree_is(running, ABOVE)  # they are connected again after a while


def test_a_worker_that_comes_late_gets_a_place(peers, tmp_path):
    with workers_of(peers, tmp_path, late=INNER) as running:
        without = {w: None if w in BELOW else ABOVE[w] for w in OTHERS}

        def is_so():
            running.publish(wait=True, worker_ids=OTHERS)
            return {worker: relays(running)[worker] for worker in OTHERS} == without

        wait_until(is_so)
        running.begin(INNER)
        running.scheme.connect(worker_idx=INNER)
        until_the_tree_is(running, ABOVE)
