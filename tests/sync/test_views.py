"""The older spelling: a scheme as its own sender and receiver."""

from __future__ import annotations

import pytest

from sync import WorkerTimeout
from tests.sync.support import ThreadWorker, bits, connect, fill, held, policy
from tests.sync.test_sender import EACH, sender


@EACH
def test_a_sender_and_a_receiver_do_what_their_scheme_does(kind):
    def take(scheme, model):
        receiver = scheme.create_receiver()
        weights = receiver.receive(timeout=20)
        return receiver is scheme, scheme.get_receiver().receive() is None, bits(weights)

    with sender(kind, model := policy(1)) as scheme, ThreadWorker(scheme, worker_idx=0) as worker:
        worker.tell(connect)
        scheme.connect()
        worker.hear()
        for send in (scheme.create_sender().send, scheme.get_sender().update_weights):
            worker.tell(take)
            send(fill(model, 3))
            assert worker.hear() == (True, True, bits(policy(3)))
        old = scheme.get_sender()
        old.send_async(policy(4), worker_ids=[0])
        with pytest.raises(WorkerTimeout):
            old.wait_async(timeout=0)
        assert worker.do(take) == (True, True, bits(policy(4)))
        old.wait_async(20)


@EACH
def test_a_receiver_applies_weights_by_hand(kind):
    def apply(scheme, model):
        scheme.create_receiver().apply_weights(policy(6), inplace=False)

    with sender(kind) as scheme, ThreadWorker(scheme, worker_idx=0) as worker:
        worker.do(apply)
        assert worker.do(held) == bits(policy(6))
