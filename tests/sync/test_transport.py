"""Transports by themselves: what every one of them does, whatever it is made of."""

from __future__ import annotations

import os
import threading

import pytest
from torch import nn

from sync import (
    Layout,
    MPTransport,
    SharedMemTransport,
    TransportBackend,
    WeightStrategy,
    WorkerDied,
    WorkerRaised,
    WorkerTimeout,
)
from sync.binding import Binding
from sync.board import Board
from sync.channel import Channel
from sync.slots import Slots
from sync.waiting import await_workers
from tests.sync.support import Counting, Handed, Worker, bits, fill, held, policy

LAYOUT = Layout.of(dict(policy().state_dict()))


def shared(layout=LAYOUT, timeout=20.0):
    return SharedMemTransport(Slots(layout, 4), Board(1), 0, timeout=timeout)


def by_message(layout=LAYOUT, timeout=20.0):
    transport = MPTransport(Channel(), timeout=timeout)
    transport.slots = Slots(layout, 3)
    return transport


MADE = {"shared": shared, "by_message": by_message}
EACH = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def join(handed, model):
    handed.transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=model)


def take(handed, model, timeout=None):
    return handed.transport.receive_weights(timeout, model=model) is not None


@EACH
def test_every_transport_is_a_transport_backend(make):
    assert isinstance(make(), TransportBackend)


@EACH
def test_a_sender_and_a_worker_need_nothing_but_the_four_calls(make):
    transport = make(timeout=5.0)
    with Worker(Handed(transport=transport)) as worker:
        worker.tell(join)
        transport.setup_connection_and_weights_on_sender()
        transport.send_weights(policy(2))
        worker.hear()
        assert worker.do(held) == bits(policy(2))
        for value in (3, 4):
            worker.tell(take, 20)
            transport.send_weights(fill(policy(), value))
            assert worker.hear()
            assert worker.do(held) == bits(policy(value))
        assert not worker.do(take)


def connected(transport, worker):
    """Both sides, with the first weights in use; a forked copy is made the worker's end."""

    def begin(handed, model):
        handed.transport.become_receiver()
        handed.transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=model)

    transport.send_weights_async(policy(1))
    worker.tell(begin)
    transport.setup_connection_and_weights_on_sender()
    worker.hear()
    transport.wait_ack()


@EACH
def test_a_worker_that_sleeps_is_woken_by_what_is_sent(make):
    transport = make(timeout=5.0)
    with Worker(Handed(transport=transport)) as worker:
        connected(transport, worker)
        worker.tell(take, 30)
        transport.send_weights(policy(2))
        assert worker.hear()


@EACH
def test_sent_without_waiting_only_the_newest_is_taken(make):
    transport = make()
    with Worker(Handed(transport=transport)) as worker:
        connected(transport, worker)
        for value in range(2, 30):
            transport.send_weights_async(policy(value))
        while worker.do(held) != bits(policy(29)):
            assert worker.do(take, 20)
            transport.collect()
        transport.wait_ack()
        assert transport.acknowledged == transport.addressed == 28
        assert transport.stats.addressed == 29
        assert transport.stats.applied <= 4


@pytest.mark.parametrize("into", ["model", "weights", "nothing"])
@EACH
def test_weights_go_into_a_model_or_into_weights_or_are_returned(make, into):
    def take_into(handed, model):
        given = {
            "model": {"model": model},
            "weights": {"weights": WeightStrategy().extract_weights(model)},
            "nothing": {},
        }[into]
        received = handed.transport.receive_weights(20, **given)
        return bits(received), bits(model)

    transport = make()
    with Worker(Handed(transport=transport)) as worker:
        connected(transport, worker)
        transport.send_weights_async(policy(2))
        received, model = worker.do(take_into)
        assert received == bits(policy(2))
        assert model == bits(policy(1 if into == "nothing" else 2))


@EACH
def test_receiving_is_bounded_and_returns_none(make):
    transport = make()
    with Worker(Handed(transport=transport)) as worker:
        connected(transport, worker)
        for timeout in (None, 0, 0.01):
            assert not worker.do(take, timeout)


@EACH
def test_a_worker_that_cannot_take_weights_says_why_to_both_sides(make):
    def wrong(handed, model):
        handed.transport.receive_weights(20, model=nn.Linear(1, 1))

    transport = make(timeout=5.0)
    with Worker(Handed(transport=transport)) as worker:
        connected(transport, worker)
        transport.send_weights_async(policy(2))
        with pytest.raises(KeyError, match=r"the Linear lacks '0\.weight'"):
            worker.do(wrong)
        with pytest.raises(WorkerRaised, match=r"the Linear lacks '0\.weight'"):
            transport.wait_ack()


@EACH
def test_waiting_ends_when_time_is_over_and_says_for_whom(make):
    transport = make(timeout=0.05)
    transport.label = "CartPole-v1"
    with pytest.raises(WorkerTimeout, match=r"worker 0 \(.*CartPole-v1\) did not connect"):
        transport.setup_connection_and_weights_on_sender()
    transport.timeout = 20
    with Worker(Handed(transport=transport)) as worker:
        connected(transport, worker)
        transport.timeout = 0.05
        with pytest.raises(WorkerTimeout, match=rf"pid {worker.process.pid}\), on version 0"):
            transport.send_weights(policy(2))


@EACH
def test_waiting_ends_when_the_worker_dies(make):
    transport = make()
    with Worker(Handed(transport=transport)) as worker:
        connected(transport, worker)
        transport.send_weights_async(policy(2))
        worker.tell(lambda h, m: os._exit(1))
        with pytest.raises(WorkerDied, match=rf"worker 0.* died \(pid {worker.process.pid}\)"):
            transport.wait_ack()
        assert transport.stats.applied == 1


@EACH
def test_values_that_are_not_finite_are_refused(make):
    transport = make()
    with Worker(Handed(transport=transport)) as worker:
        connected(transport, worker)
        spoiled = policy(2)
        spoiled[0].weight.data[0] = float("nan")
        with pytest.raises(ValueError, match=r"'0\.weight' holds 3 NaN"):
            transport.send_weights_async(spoiled)
        assert not worker.do(take)


@EACH
def test_extra_state_is_part_of_weights_that_are_returned(make):
    def begin(handed, model):
        handed.transport.become_receiver()
        weights = handed.transport.setup_connection_and_weights_on_receiver(worker_idx=0)
        return WeightStrategy("state_dict").extract_weights(weights)["_extra_state"]

    source = Counting({"seen": 3})
    transport = make(Binding(source, WeightStrategy()).layout)
    with Worker(Handed(transport=transport), None) as worker:
        transport.send_weights_async(source)
        worker.tell(begin)
        transport.setup_connection_and_weights_on_sender()
        assert worker.hear() == {"seen": 3}


def test_waiting_for_several_workers_is_one_wait_and_names_all_that_failed():
    board, slots = Board(3), Slots(LAYOUT, 10)
    transports = [SharedMemTransport(slots, board, index) for index in range(3)]
    first, second = (Worker(Handed(transport=transport)) for transport in transports[:2])
    with first, second:
        for worker in (first, second):
            worker.tell(greet)
        failures = await_workers(transports, lambda t: t.watch is not None, 0.5)
        assert list(failures) == [2]
        second.tell(lambda h, m: os._exit(1))
        failures = await_workers(transports[:2], lambda t: t.acknowledged >= 0, 0.5)
        assert {i: type(f) for i, f in failures.items()} == {0: WorkerTimeout, 1: WorkerDied}


def greet(handed, model):
    handed.transport.become_receiver()
    handed.transport.greet()


def test_a_thread_may_be_the_worker():
    transport = shared()
    model, errors = policy(0), []

    def work():
        twin = SharedMemTransport(transport.slots.read_only(), transport.board, 0)
        try:
            twin.setup_connection_and_weights_on_receiver(worker_idx=0, model=model)
        except Exception as error:  # noqa: BLE001 - seen by the test
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    transport.setup_connection_and_weights_on_sender()
    transport.send_weights(policy(2))
    thread.join(20)
    assert not errors
    assert bits(model) == bits(policy(2))
