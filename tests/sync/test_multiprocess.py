"""Weights by message: over lines of their own, and over any queue that has put and get."""

from __future__ import annotations

import multiprocessing
import queue
import threading

import pytest
from torch import nn

from sync import Link, MPTransport, MultiProcessWeightSyncScheme, WorkerRaised, WorkerTimeout
from tests.promises.probe import wait_until
from tests.sync.support import Handed, Worker, bits, fill, held, policy, receive, running

fork = multiprocessing.get_context("fork")


@pytest.fixture
def queues():
    """A queue for weights and one for answers, closed for good afterwards."""
    both = fork.Queue(), fork.Queue()
    yield both
    for each in both:
        each.cancel_join_thread()
        each.close()


def join(handed, model):
    handed.transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=model)


def take(handed, model, timeout=None):
    return handed.transport.receive_weights(timeout, model=model) is not None


def test_over_plain_queues_a_send_waits_for_its_answer(queues):
    transport = MPTransport(*queues, timeout=20)
    with Worker(Handed(transport=transport)) as worker:
        worker.tell(join)
        transport.setup_connection_and_weights_on_sender()
        transport.send_weights(policy(2))
        worker.hear()
        assert worker.do(held) == bits(policy(2))
        model = policy(3)
        for value in (3, 4):
            worker.tell(take, 20)
            transport.send_weights(fill(model, value))
            assert transport.acknowledged == transport.addressed
            assert worker.hear()
            assert worker.do(held) == bits(policy(value))


def test_without_a_queue_for_answers_a_send_does_not_wait(queues):
    transport = MPTransport(queues[0], timeout=20)
    transport.send_weights(policy(2))
    with Worker(Handed(transport=transport)) as worker:
        worker.do(join)
        assert worker.do(held) == bits(policy(2))
        transport.send_weights_async(policy(3))
        assert worker.do(take, 20)
        assert worker.do(held) == bits(policy(3))


def test_over_plain_queues_an_answer_that_does_not_come_is_an_error_within_bounds(queues):
    transport = MPTransport(*queues, timeout=0.05)
    with pytest.raises(WorkerTimeout, match="worker 0"):
        transport.send_weights(policy(2))


def test_over_plain_queues_receiving_is_bounded(queues):
    transport = MPTransport(*queues, timeout=0.01)
    for timeout in (None, 0, 0.01):
        assert transport.receive_weights(timeout, model=policy()) is None
    assert transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=policy()) is None


def test_over_plain_queues_an_error_comes_back_with_its_traceback(queues):
    transport = MPTransport(*queues, timeout=60)
    with Worker(Handed(transport=transport), lambda: nn.Linear(1, 1)) as worker:
        transport.send_weights_async(policy(2))
        with pytest.raises(KeyError, match=r"lacks '0\.weight'"):
            worker.do(take, 20)
        with pytest.raises(WorkerRaised, match=r"worker 0.* raised(.*\n)+.*lacks '0\.weight'"):
            transport.wait_ack()


def test_a_plain_queue_never_grows_and_the_newest_is_what_is_read():
    weights, answers = queue.Queue(), queue.Queue()
    transport, model = MPTransport(weights, answers), policy()
    for value in range(50):
        transport.send_weights_async(policy(value))
        assert weights.qsize() == 1
    twin = MPTransport(weights, answers)
    assert bits(twin.receive_weights(20, model=model)) == bits(policy(49))
    transport.wait_ack()
    assert transport.acknowledged == 49
    assert twin.receive_weights(model=model) is None


def test_a_queue_between_processes_stays_short_and_ends_with_the_newest(queues):
    transport = MPTransport(*queues, timeout=20)
    with Worker(Handed(transport=transport)) as worker:
        for value in range(50):
            transport.send_weights_async(policy(value))
        assert queues[0].qsize() < 25  # what its thread has not written yet cannot be taken back
        worker.do(join)
        while worker.do(held) != bits(policy(49)):
            assert worker.do(take, 20)
        transport.wait_ack()
        assert transport.acknowledged == 49
        assert queues[0].empty()


def test_what_is_sent_over_a_plain_queue_is_a_copy(queues):
    model = policy(2)
    transport = MPTransport(queues[0])
    transport.send_weights_async(model)
    fill(model, 9)
    with Worker(Handed(transport=transport)) as worker:
        worker.do(join)
        assert worker.do(held) == bits(policy(2))


def test_threads_may_share_a_plain_queue():
    weights, answers = queue.Queue(), queue.Queue()
    sender, receiver = MPTransport(weights, answers), MPTransport(weights, answers)
    model = policy()
    thread = threading.Thread(target=lambda: receiver.receive_weights(20, model=model))
    thread.start()
    sender.send_weights(policy(2))
    thread.join(20)
    assert bits(model) == bits(policy(2))


def scheme_of(workers, **options):
    scheme = MultiProcessWeightSyncScheme(timeout=20, **options)
    scheme.init_on_sender(model=policy(1), devices=["cpu"] * workers)
    return scheme


def service_threads():
    return [thread for thread in threading.enumerate() if thread.name == "lockstep-send"]


def test_a_version_that_waits_is_fed_when_the_worker_has_answered():
    with running(scheme := scheme_of(2)) as workers:
        assert not service_threads()
        for value in range(2, 10):
            scheme.send_async(policy(value))
        assert len(service_threads()) == 1
        for worker in workers:
            assert worker.do(receive, 20)  # what was on the way
            assert worker.do(receive, 20)  # what waited, without any call of the sender's
            assert worker.do(held) == bits(policy(9))
        assert not any(worker.do(receive) for worker in workers)
        assert scheme.acknowledged == {0: 8, 1: 8}
    assert not service_threads()


def test_versions_that_wait_are_fed_while_the_trainer_waits_for_another_worker():
    with running(scheme := scheme_of(2)) as (keen, stuck):
        for value in (2, 3, 4):
            scheme.send_async(policy(value), worker_ids=0)
        waiting = threading.Thread(target=scheme.send, args=(policy(5), 1))
        waiting.start()
        while stuck.do(lambda s, m: not s.has_news()):
            continue
        assert keen.do(receive, 20)  # what was on the way
        assert keen.do(receive, 5)  # what waited
        assert keen.do(held) == bits(policy(4))
        assert waiting.is_alive()
        assert stuck.do(receive)
        waiting.join(20)
        assert scheme.acknowledged == {0: 3, 1: 4}


def test_two_blocks_are_enough_for_workers_that_keep_up():
    with running(scheme := scheme_of(4), background=True):
        for value in range(2, 20):
            scheme.send(policy(value))
        pool = scheme._sender.channel.blocks
        assert pool.memory_bytes <= 2 * pool.layout.nbytes + 2 * 4096


def test_a_version_that_waits_behind_one_that_timed_out_is_sent_when_the_worker_answers():
    scheme = scheme_of(1)
    with running(scheme) as (worker,):
        scheme._sender._timeout = 0.1
        for value in (2, 3):
            with pytest.raises(WorkerTimeout):
                scheme.send(policy(value))
        assert worker.do(receive, 20)
        assert worker.do(receive, 20)  # without any call of the sender's
        assert worker.do(held) == bits(policy(3))


def test_a_version_that_waits_is_not_overwritten_by_those_of_another_worker():
    scheme = scheme_of(2, link=Link(latency_ms=1))  # a link asks for blocks as they arrive
    with running(scheme) as (idle, busy):
        for value in (2, 3):
            scheme.send_async(policy(value))
        while scheme.stats["workers"][0]["link"]["in_flight"]:
            continue
        for value in range(4, 9):
            scheme.send_async(policy(value), worker_ids=[1])
            while busy.do(held) != bits(policy(value)):
                busy.do(receive, 20)
        assert idle.do(receive, 20)  # what was on the way
        assert idle.do(receive, 20)  # what waited
        assert idle.do(held) == bits(policy(3))


def test_nothing_waits_for_a_worker_that_is_gone():
    with running(scheme := scheme_of(2), method="fork") as (killed, other):
        for value in (2, 3):
            scheme.send_async(policy(value))
        killed.process.kill()
        killed.process.join()
        for _ in range(2):
            assert other.do(receive, 20)
        # The sender's thread may be reading the answers just now.
        wait_until(lambda: scheme.acknowledged == {0: 0, 1: 2})
        assert scheme._sender.channel.due_ns() is None
        assert not scheme._sender.channel._waiting
