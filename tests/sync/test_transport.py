"""A scheme as the transport of one worker: the four calls of `TransportBackend`, and no more."""

from __future__ import annotations

import pytest

from sync import (
    MPTransport,
    TransportBackend,
    WeightStrategy,
)
from tests.sync.support import EACH, KINDS, Worker, bits, fill, held, policy, running, sender


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


@pytest.mark.parametrize(("kind", "into"), zip(KINDS, ["model", "weights", "nothing"], strict=True))
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
