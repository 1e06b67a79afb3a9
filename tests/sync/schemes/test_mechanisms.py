"""Each scheme moves versions by the mechanism that it is named after, and by no other's."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from sync import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SimulatedWeightSyncScheme,
)
from sync.local.waiting import wait_for
from tests.own_process import in_own_process
from tests.sync.support import (
    EACH_OF_ALL,
    KINDS,
    Worker,
    bits,
    connect,
    held,
    policy,
    receive,
    running,
    sender,
)


def what_arrived(scheme, model):
    """Whether the kernel holds a message for the worker, and which memory its process shares."""
    poll = select.poll()
    poll.register(scheme._receiver.channel._connection.fd, select.POLLIN)
    maps = Path("/proc/self/maps").read_text().count("memfd:lockstep")
    return bool(poll.poll(0)), maps


def announced(scheme, model):
    return scheme._receiver.channel.row.latest >> 16


def test_under_shared_mem_no_message_is_sent_and_the_board_names_the_version():
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=policy(1), devices=["cpu"])
    with running(scheme) as (worker,):
        for version in (1, 2, 3):
            scheme.send_async(policy(version))
            assert worker.do(announced) == version + 1
            assert worker.do(what_arrived)[0] is False
            assert worker.do(receive)
            assert worker.do(held) == bits(policy(version))
        nbytes = scheme._sender.layout.nbytes
        moved = {"versions": 4, "bytes": 4 * nbytes}
        assert scheme.stats["moved"] == {"shared memory": moved}


def test_under_multiprocess_each_version_is_a_message_and_there_is_no_board():
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(model=policy(1), devices=["cpu"] * 2)
    with running(scheme) as workers:
        maps = [worker.do(what_arrived)[1] for worker in workers]
        for version in (1, 2, 3):
            scheme.send_async(policy(version))
            for worker in workers:
                assert worker.do(what_arrived)[0] is True
                assert worker.do(receive)
                assert worker.do(held) == bits(policy(version))
                assert worker.do(what_arrived)[0] is False
        assert all(count >= 1 for count in maps)  # the blocks that messages name
        moved = {"versions": 8, "bytes": 8 * scheme._sender.layout.nbytes}
        assert scheme.stats["moved"] == {"messages": moved}


@EACH_OF_ALL
@in_own_process
def test_pickling_a_scheme_opens_no_descriptor(kind):
    """Also outside of the start of a process, as for a queue that nobody reads."""

    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with sender(kind, workers=3) as scheme:
        before = count()
        pickles = [ForkingPickler.dumps(scheme) for _ in range(50)]
        assert count() == before
        twins = [pickle.loads(data) for data in pickles]
        assert count() == before
        assert [twin.num_workers for twin in twins] == [3] * 50


@EACH_OF_ALL
@in_own_process
def test_a_worker_costs_the_sender_two_descriptors(kind):
    def count(workers):
        """How many the scheme holds while its workers are connected."""
        with running(scheme := sender(kind, workers=workers)):
            gc.collect()
            before = len(os.listdir("/proc/self/fd"))
            scheme.shutdown()
            gc.collect()
            return before - len(os.listdir("/proc/self/fd"))

    assert count(12) - count(2) == 2 * 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_closes_copies_of_its_descriptors_stays_the_worker(kind):
    def close_copies(scheme, model):
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
                os.close(os.dup(fd))
            except OSError:
                continue

    def come_second(scheme, model):
        scheme.connect_timeout = 20
        scheme.init_on_receiver(model=model, worker_idx=0)
        connect(scheme, model)

    with running(scheme := sender(kind), method="fork") as (worker,):
        worker.do(close_copies)
        with Worker(scheme) as second:
            second.tell(come_second)
            served = rf"already served by a live process \(pid {worker.process.pid}\)"
            while not second._pipe.poll(0.01):
                scheme.send_async()
            with pytest.raises(ConnectionError, match=served):
                second.hear()
        scheme.send_async(policy(4))
        assert worker.do(receive, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_has_nothing_to_do_after_a_worker_died_and_was_replaced(kind):
    """What is left registered of a dead worker would have every wait return at once."""
    with running(scheme := sender(kind), method="fork") as (worker,):
        for _ in range(3):
            worker.die()
            worker = Worker(scheme, worker_idx=0)
            worker.meet(scheme, worker_idx=0)
            channel = scheme._sender.channel
            assert channel._poll.poll(0) == []
            assert wait_for(channel.fds(), 0) == []
            assert len(channel.fds()) == 3
        worker.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_may_leave_and_come_back_between_two_polls(kind):
    def again(scheme, model):
        scheme.shutdown()

    with running(scheme := sender(kind)) as (worker,), contextlib.ExitStack() as others:
        for value in range(2, 12):
            twin = others.enter_context(Worker(scheme, worker_idx=0))
            worker.do(again)
            twin.meet(scheme, worker_idx=0)
            worker = twin
            scheme.send_async(policy(value))
            assert worker.do(receive, 20)


def test_a_version_that_no_virtual_worker_has_taken_yet_is_kept():
    scheme = SimulatedWeightSyncScheme()
    scheme.init_on_sender(model=policy(1), devices=["cpu"])
    with scheme:
        scheme.connect()
        for value in (2, 3, 4):
            scheme.send_async(policy(value))
        models = [policy(0) for _ in scheme.channel.published]
        for model, (block, _) in zip(models, scheme.channel.published, strict=True):
            scheme.loader(model)(block)
        assert [bits(model) for model in models] == [bits(policy(v)) for v in (1, 2, 3, 4)]
