"""Weights by message: over lines of their own, and over any queue that has put and get."""

from __future__ import annotations

import multiprocessing
import queue
import threading

import pytest
import torch
from torch import nn

from sync import MPTransport, MultiProcessWeightSyncScheme, WorkerRaised, WorkerTimeout
from sync.home import AWAY
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
    transport = MPTransport(*queues, timeout=5)
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


def feeders():
    return [thread for thread in threading.enumerate() if thread.name == "lockstep-feed"]


def test_a_version_that_waits_is_fed_when_the_worker_has_answered():
    with running(scheme := scheme_of(2)) as workers:
        assert not feeders()
        for value in range(2, 10):
            scheme.send_async(policy(value))
        assert len(feeders()) == 1
        for worker in workers:
            assert worker.do(receive, 20)  # what was on the way
            assert worker.do(receive, 20)  # what waited, without any call of the sender's
            assert worker.do(held) == bits(policy(9))
        assert not any(worker.do(receive) for worker in workers)
        assert scheme.acknowledged == {0: 8, 1: 8}
    assert not feeders()


def test_a_version_that_waits_is_fed_though_its_send_was_interrupted(monkeypatch):
    def interrupted(line):
        raise KeyboardInterrupt

    with running(scheme := scheme_of(1)) as (worker,):
        scheme.send_async(policy(2))
        with monkeypatch.context() as patch:
            patch.setattr(MPTransport, "bring", interrupted)
            with pytest.raises(KeyboardInterrupt):
                scheme.send_async(policy(3))
        assert worker.do(receive, 20)
        assert worker.do(receive, 20)
        assert worker.do(held) == bits(policy(3))


def test_a_worker_that_reads_nothing_holds_up_no_other():
    with running(scheme := scheme_of(2)) as (idle, busy):
        for value in range(2, 20):
            busy.tell(receive, 20)
            scheme.send(policy(value), worker_ids=1)
            scheme.send_async(policy(value), worker_ids=0)
            assert busy.hear()
            assert busy.do(held) == bits(policy(value))
        assert scheme.acknowledged[0] == 0
        while idle.do(receive, 1):
            pass
        assert idle.do(held) == bits(policy(19))


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


def test_one_block_is_enough_for_workers_that_keep_up():
    with running(scheme := scheme_of(4), background=True):
        for value in range(2, 20):
            scheme.send(policy(value))
        slots = scheme.create_transport().slots
        one_block = slots.memory_bytes
        assert one_block <= 2 * slots.layout.nbytes + 2 * 4096


# -- versions that need no message


def begin(scheme, model):
    """Rest until the scheme ends, or `end`."""
    model.rest = scheme.resting()
    model.rest.__enter__()


def end(scheme, model):
    model.rest.__exit__(None, None, None)


def test_what_was_put_into_a_model_is_never_taken_again_over_something_newer():
    def look_again(scheme, model):
        scheme._receiver.transport.look_again()
        return scheme.receive() is None, scheme.version, scheme.has_news()

    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(model=policy(1), devices=["cpu"])
    with running(scheme) as (worker,):
        worker.do(begin)
        scheme.send(policy(2))  # into the model
        worker.do(end)
        scheme.send_async(policy(3))  # by message
        assert worker.do(receive)
        assert worker.do(look_again) == (True, 2, False)
        assert worker.do(held) == bits(policy(3))


def test_a_version_that_waits_behind_a_message_is_not_put_into_the_model_before_it():
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(model=policy(1), devices=["cpu"])
    with running(scheme) as (worker,):
        scheme.send_async(policy(2))  # by message, which nobody has read
        worker.do(begin)
        scheme.send_async(policy(3))
        assert worker.do(held) == bits(policy(1))
        wait_until(lambda: worker.do(lambda s, m: (s.receive(), s.version)[1]) == 2)
        assert worker.do(held) == bits(policy(3))


def test_models_that_rest_cost_one_block_more_and_no_more():
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(model=policy(1), devices=["cpu"] * 3)
    with running(scheme) as workers:
        for worker in workers:
            worker.do(begin)
        for value in range(2, 60):
            scheme.send(policy(value))
        assert [worker.do(held) for worker in workers] == [bits(policy(59))] * 3
        slots = scheme._sender.slots
        assert slots.memory_bytes <= 3 * slots._stride


def at_rest(*, workers=1):
    """A scheme, to be sent to workers that begin to rest."""
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(model=policy(1), devices=["cpu"] * workers)
    return scheme


def test_what_was_put_into_a_model_is_found_after_the_sender_has_closed():
    def replace(scheme, model):
        model[0].weight = nn.Parameter(torch.zeros(4, 3))

    def look(scheme, model):
        end(scheme, model)
        rounds = 0
        while scheme.has_news() and rounds < 100:
            scheme.receive()
            rounds += 1
        return rounds < 100

    with running(scheme := at_rest()) as (worker,):
        worker.do(replace)
        worker.do(begin)
        scheme.send(policy(2))
        scheme.shutdown()
        assert worker.do(look)
        assert worker.do(held) == bits(policy(2))


def test_a_message_that_a_newer_version_overtook_is_dropped():
    """The thread that was to take it has failed; what comes later is put into the model."""

    def fail(scheme, model):
        def no_descriptors():
            raise OSError(24, "Too many open files")

        threading.excepthook = lambda failure: None
        scheme._receiver._apply_and_tell = no_descriptors
        model.reading = scheme.reading()
        model.reading.__enter__()

    def let_go(scheme, model):
        model.reading.__exit__(None, None, None)
        scheme._receiver._thread.join(20)

    def read(scheme, model):
        with scheme.reading() as version:
            return version, bits(model)

    with running(scheme := at_rest(), background=True) as (worker,):
        worker.do(fail)
        scheme.send_async(policy(2))
        worker.do(let_go)
        with pytest.raises(WorkerRaised, match="Too many open files"):
            scheme.send(policy(3))
        for value in (4, 5):
            scheme.send(policy(value))
        assert worker.do(read) == (4, bits(policy(5)))


def test_who_moved_out_meanwhile_is_sent_a_message_and_keeps_what_it_reads(monkeypatch):
    """The worker leaves its home after the sender has looked, and before it says what it brings."""
    with running(scheme := at_rest()) as (worker,):
        worker.do(begin)
        scheme.send(policy(2))
        line = scheme.create_transport()
        before, tell = line._brought, line.weight_queue.tell_brought

        def too_late(word):
            line.weight_queue.tell_home(AWAY)
            tell(word)

        monkeypatch.setattr(line.weight_queue, "tell_brought", too_late)
        scheme.send_async(policy(3))
        assert scheme.acknowledged == {0: 1}
        assert before in line.held()
        assert line._on_the_way is not None
        worker.do(end)
        wait_until(lambda: worker.do(lambda s, m: (s.receive(), s.version)[1]) == 2)
        assert worker.do(held) == bits(policy(3))


def test_an_interrupt_while_workers_are_told_what_is_next_leaves_none_waiting(monkeypatch):
    address = MPTransport.address

    def interrupted(self, slot, version):
        address(self, slot, version)
        raise KeyboardInterrupt

    with running(scheme := at_rest(workers=2), background=True) as workers:
        with monkeypatch.context() as patch:
            patch.setattr(MPTransport, "address", interrupted)
            with pytest.raises(KeyboardInterrupt):
                scheme.send(policy(2))
        scheme.wait_async(10)
        assert workers[0].do(lambda s, m: s.receive() is not None or s.version == 1)
