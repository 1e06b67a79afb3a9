"""A scheme goes from process to process, whole and on its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import weakref

import pytest
import torch.multiprocessing

from sync import NoWeightSyncScheme
from sync.local.waiting import wait_for
from tests.conftest import describe, shm_entries
from tests.sync.support import (
    EACH,
    EACH_OF_ALL,
    EVERY,
    KINDS,
    Worker,
    bits,
    held,
    policy,
    receive,
    running,
    sender,
)
from tests.sync.test_scheme import NOTHING, known


@EACH_OF_ALL
def test_a_scheme_that_is_let_go_takes_everything_with_it(kind):
    scheme = sender(kind)
    gone = weakref.ref(scheme)
    with Worker(scheme, worker_idx=0) as worker:
        worker.meet(scheme)
        del scheme
        gc.collect()
        assert gone() is None
        with pytest.raises(ConnectionError, match="the sender is gone"):
            worker.do(lambda s, m: s.receive(timeout=20))


@EACH_OF_ALL
def test_a_forked_child_that_ends_does_not_shut_its_parents_scheme_down(kind):
    with running(scheme := sender(kind)) as (worker,):
        with Worker(scheme) as other:
            other.do(lambda s, m: s.shutdown())
            with pytest.raises(RuntimeError, match="send is for the sender"):
                other.do(lambda s, m: s.send())
        scheme.send_async(policy(2))
        assert worker.do(receive)


class Both(list):
    """Two schemes handed over as one."""

    def shutdown(self):
        for scheme in self:
            scheme.shutdown()


@pytest.mark.parametrize("method", ["forkserver", "torch.multiprocessing.spawn"])
def test_schemes_of_every_kind_travel_to_a_child_that_is_not_a_fork(method):
    schemes = Both(sender(kind, policy(i)) for i, kind in enumerate(EVERY))
    with Worker(schemes, lambda: [policy() for _ in EVERY], method=method) as worker:
        worker.tell(connect_all)
        for scheme in schemes:
            scheme.connect()
        worker.hear()
        expected = [bits(policy(i)) for i in range(len(EVERY))]
        assert worker.do(lambda s, m: [bits(x) for x in m]) == expected
        schemes[0].send_async(policy(7))  # which changes no other's model
        assert worker.do(lambda s, m: [x.receive() is not None for x in s[:3]]) == [
            True,
            False,
            False,
        ]
        assert worker.do(lambda s, m: [bits(x) for x in m]) == [bits(policy(7)), *expected[1:]]
        assert worker.do(lambda s, m: [x.version for x in s]) == [1, 0, 0, 0]
        for scheme in schemes:
            scheme.send_async(policy(8))
        assert all(worker.do(lambda s, m: [x.receive() is not None for x in s]))
        assert worker.do(lambda s, m: [bits(x) for x in m]) == [bits(policy(8))] * len(EVERY)
        schemes.shutdown()


def connect_all(schemes, models):
    for scheme, model in zip(schemes, models, strict=True):
        scheme.init_on_receiver(model=model, worker_idx=0)
        scheme.connect(background=False)


@pytest.mark.parametrize(
    ("kind", "library"),
    [
        ("shared_copy", multiprocessing),
        ("shared_zero_copy", torch.multiprocessing),
        ("multiprocess", torch.multiprocessing),
        ("hogwild", multiprocessing),
    ],
)
def test_a_scheme_travels_through_a_queue(kind, library):
    queue = library.get_context("fork").Queue()
    with sender(kind, policy(3)) as scheme, Worker(Later(queue), policy) as worker:
        worker.tell(lambda s, m: s.take(m))
        queue.put(scheme)
        scheme.connect()
        worker.hear()
        scheme.send_async(policy(4))
        assert worker.do(lambda s, m: s.scheme.receive() is not None)
        assert worker.do(held) == bits(policy(4))
    queue.close()
    queue.join_thread()


class Later:
    """A worker's place for a scheme that has yet to come."""

    def __init__(self, queue):
        self.queue = queue
        self.scheme = NoWeightSyncScheme()

    def take(self, model):
        self.scheme = self.queue.get(timeout=20)
        self.scheme.init_on_receiver(model=model, worker_idx=0)
        self.scheme.connect(background=False)

    def shutdown(self):
        self.scheme.shutdown()


@EACH_OF_ALL
def test_what_is_handed_over_knows_nothing_of_the_senders_side(kind):
    with running(scheme := sender(kind)):
        handed = pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(scheme))
        assert known(handed) == NOTHING
        assert handed.num_workers == 1


@EACH
def test_the_death_of_the_sender_is_seen(kind):
    with Worker(KINDS[kind]()) as grandparent:
        assert "the sender is gone" in grandparent.do(orphaned)


def orphaned(scheme, model):
    """Start a sender whose process ends under its own worker; returns what that worker says."""
    heard, says = os.pipe()
    sender = os.fork()
    if sender == 0:
        try:
            scheme.init_on_sender(model=model, devices=["cpu"])
            if os.fork() == 0:
                os.write(says, outlive(scheme, model).encode())
            else:
                scheme.connect()
        finally:
            os._exit(0)
    os.waitpid(sender, 0)
    assert any(wait_for([heard], 1.0) for _ in range(30))
    return os.read(heard, 1000).decode()


def outlive(scheme, model):
    try:
        scheme.init_on_receiver(model=model, worker_idx=0)
        scheme.connect(background=False)
        return repr(scheme.receive(timeout=20))
    except (ConnectionError, TimeoutError) as error:
        return str(error)


@EACH_OF_ALL
def test_nothing_has_a_name_at_any_time(kind):
    before = shm_entries()
    with running(scheme := sender(kind)) as (worker,):
        scheme.send_async(policy(2))
        worker.do(receive)
        assert describe(set(), shm_entries() - before) == []
