"""A scheme as the transport of one worker: the four calls of `TransportBackend`, and no more."""

from __future__ import annotations

import os

import pytest
from torch import nn

from sync import (
    MPTransport,
    TransportBackend,
    WeightStrategy,
    WorkerDied,
    WorkerRaised,
    WorkerTimeout,
)
from tests.sync.support import KINDS, Counting, Worker, bits, fill, held, policy, running

EACH = pytest.mark.parametrize("kind", KINDS)


def sender(kind, model=None, workers=1, **options):
    options = {"timeout": 20.0, **options}
    scheme = KINDS[kind](**options)
    scheme.init_on_sender(model=policy(1) if model is None else model, devices=["cpu"] * workers)
    return scheme


def join(scheme, model):
    transport = scheme.create_transport(worker_idx=0)
    transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=model)


def take(scheme, model, timeout=None):
    return scheme.create_transport(worker_idx=0).receive_weights(timeout, model=model) is not None


@EACH
def test_every_scheme_has_a_transport_backend(kind):
    with sender(kind) as scheme:
        assert isinstance(scheme.create_transport(), TransportBackend)
    assert isinstance(MPTransport(None), TransportBackend)


@EACH
def test_a_sender_and_a_worker_need_nothing_but_the_four_calls(kind):
    with sender(kind) as scheme, Worker(scheme) as worker:
        transport = scheme.create_transport(worker_idx=0)
        worker.tell(join)
        transport.setup_connection_and_weights_on_sender()
        worker.hear()
        assert worker.do(held) == bits(policy(1))
        for value in (3, 4):
            worker.tell(take, 20)
            transport.send_weights(fill(policy(), value))
            assert worker.hear()
            assert worker.do(held) == bits(policy(value))
        assert not worker.do(take)


@EACH
def test_what_is_sent_goes_to_that_worker_alone(kind):
    with running(scheme := sender(kind, workers=2), background=True) as workers:
        scheme.create_transport(worker_idx=1).send_weights(policy(5))
        assert [worker.do(held) for worker in workers] == [bits(policy(1)), bits(policy(5))]
        assert scheme.acknowledged == {0: 0, 1: 1}


@pytest.mark.parametrize("into", ["model", "weights", "nothing"])
@EACH
def test_weights_go_into_a_model_or_into_weights_or_are_returned(kind, into):
    def take_into(scheme, model):
        other = policy(0)
        given = {
            "model": {"model": other},
            "weights": {"weights": WeightStrategy().extract_weights(other)},
            "nothing": {},
        }[into]
        received = scheme.create_transport(worker_idx=0).receive_weights(20, **given)
        return bits(received), bits(other)

    with running(scheme := sender(kind)) as (worker,):
        scheme.create_transport().send_weights_async(policy(2))
        received, other = worker.do(take_into)
        assert received == bits(policy(2))
        assert other == bits(policy(0 if into == "nothing" else 2))
        assert worker.do(held) == bits(policy(2))


@EACH
def test_receiving_is_bounded_and_returns_none(kind):
    with running(sender(kind)) as (worker,):
        for timeout in (None, 0, 0.01):
            assert not worker.do(take, timeout)


@EACH
def test_a_worker_that_cannot_take_weights_says_why_to_both_sides(kind):
    with sender(kind) as scheme, Worker(scheme, lambda: nn.Linear(1, 1)) as worker:
        worker.tell(join)
        with pytest.raises(WorkerRaised, match=r"the Linear lacks '0\.weight'"):
            scheme.create_transport().setup_connection_and_weights_on_sender()
        with pytest.raises(KeyError, match=r"the Linear lacks '0\.weight'"):
            worker.hear()


@EACH
def test_waiting_ends_when_time_is_over_and_says_for_whom(kind):
    with sender(kind, connect_timeout=0.05) as scheme:
        scheme.describe_worker(0, "CartPole-v1")
        with pytest.raises(WorkerTimeout, match=r"worker 0 \(.*CartPole-v1\) did not connect"):
            scheme.create_transport().setup_connection_and_weights_on_sender()
    with (
        running(scheme := sender(kind, timeout=0.05), method="fork") as (worker,),
        pytest.raises(WorkerTimeout, match=rf"pid {worker.process.pid}\), on version 0"),
    ):
        scheme.create_transport().send_weights(policy(2))


@EACH
def test_waiting_ends_when_the_worker_dies(kind):
    with running(scheme := sender(kind), method="fork") as (worker,):
        transport = scheme.create_transport()
        transport.send_weights_async(policy(2))
        worker.tell(lambda s, m: os._exit(1))
        with pytest.raises(WorkerDied, match=rf"worker 0.* died \(pid {worker.process.pid}\)"):
            transport.wait_ack()


@EACH
def test_extra_state_is_part_of_weights_that_are_returned(kind):
    def begin(scheme, model):
        transport = scheme.create_transport(worker_idx=0)
        weights = transport.setup_connection_and_weights_on_receiver(worker_idx=0)
        return WeightStrategy("state_dict").extract_weights(weights)["_extra_state"]

    with sender(kind, Counting({"seen": 3})) as scheme, Worker(scheme, None) as worker:
        worker.tell(begin)
        scheme.create_transport().setup_connection_and_weights_on_sender()
        assert worker.hear() == {"seen": 3}
