"""No synchronisation: nothing moves, and everything else is as with any scheme."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from sync import NoWeightSyncScheme, SharedMemWeightSyncScheme
from tests.sync.support import Worker, bits, connect, held, policy, receive
from tests.sync.test_scheme import NOTHING, known


def scheme_of(model, **more):
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender(model=model, devices=["cpu"] * 2, **more)
    return scheme


def test_each_step_is_seen_in_its_properties():
    scheme, model = NoWeightSyncScheme(), policy(1)
    assert known(scheme) == NOTHING
    scheme.init_on_sender(model_id="policy", model=model, devices=["cpu"] * 2)
    at_first = {**NOTHING, "sender": True, "model id": "policy", "weights": bits(model)}
    assert known(scheme) == at_first
    assert scheme.acknowledged == {0: -1, 1: -1}
    scheme.connect()
    assert known(scheme) == {**at_first, "sender synchronized": True, "version": 0}
    assert (scheme.num_workers, scheme.acknowledged) == (2, {0: 0, 1: 0})
    assert scheme.model is model


def test_workers_keep_what_they_started_with():
    scheme = scheme_of(policy(1))
    with Worker(scheme, lambda: policy(5), worker_idx=1) as worker:
        scheme.connect()
        worker.do(connect)
        for send in (scheme.send, scheme.send_async):
            send(policy(3))
            scheme.wait_async()
            assert not worker.do(receive)
        assert worker.do(held) == bits(policy(5))
        assert worker.do(lambda s, m: (s.version, s.worker_idx, s.model is m)) == (0, 1, True)
        assert worker.do(reading) == 0
    assert scheme.version == 0


def reading(scheme, model):
    with scheme.reading() as version:
        return version


def test_what_is_handed_over_knows_nothing_of_the_senders_side():
    handed = pickle.loads(pickle.dumps(scheme_of(policy(1), model_id="policy")))
    assert known(handed) == {**NOTHING, "model id": "policy"}
    with pytest.raises(RuntimeError, match="connect"):
        handed.connect()


def test_a_receiver_may_find_its_model_in_a_context():
    class Context:
        worker_idx = 1

        def __init__(self, model):
            self.model = model

        def get_model(self, model_id):
            return {"policy": self.model}[model_id]

    scheme = pickle.loads(pickle.dumps(scheme_of(policy(1))))
    context = Context(policy(2))
    scheme.init_on_receiver(model_id="policy", context=context)
    assert scheme.model is context.model
    assert scheme.context is context
    assert scheme.worker_idx == 1


def test_a_mix_that_any_scheme_refuses_is_refused():
    with pytest.raises(ValueError, match="init_on_sender got"):
        NoWeightSyncScheme().init_on_sender(model=policy(), weights={}, devices=["cpu"])


def test_connect_needs_a_side():
    with pytest.raises(RuntimeError, match=r"connect is for a receiver: call it between init_on"):
        NoWeightSyncScheme().connect()


def test_stats_say_that_nothing_was_sent():
    scheme = scheme_of(policy(1))
    scheme.connect()
    scheme.send()
    moving = SharedMemWeightSyncScheme()
    moving.init_on_sender(model=policy(1), devices=["cpu"])
    assert scheme.stats.keys() == moving.stats.keys()
    moving.shutdown()
    assert (scheme.stats["version"], scheme.stats["sends"], scheme.stats["bytes"]) == (0, 0, 0)
    assert (scheme.stats["moved"], scheme.stats["workers"]) == ({}, {})
    assert (scheme.verified_calls, scheme.links) == (0, {})
    scheme.describe_worker(1, "the second")
    with pytest.raises(ValueError, match="no worker 2, only 0 to 1"):
        scheme.describe_worker(2, "the third")


def test_weights_can_be_applied_by_hand():
    model = policy(1)
    scheme = scheme_of(model)
    scheme.apply_weights(policy(4))
    assert bits(model) == bits(policy(4))
    with scheme:
        scheme.shutdown()


def test_what_no_scheme_could_send_is_refused():
    scheme = scheme_of(policy(1))
    scheme.connect()
    for send in (scheme.send, scheme.send_async):
        with pytest.raises(ValueError, match="no worker 2, only 0 to 1"):
            send(worker_ids=[0, 2])
        with pytest.raises(ValueError, match="no worker 7, only 0 to 1"):
            send({0: policy(1), 7: policy(2)})
        with pytest.raises(ValueError, match=r"weights for workers \[0\] disagree"):
            send({0: policy(1)}, worker_ids=1)
        send({0: policy(1)}, worker_ids=0)
        send(worker_ids=1)
    with pytest.raises(RuntimeError, match="receive is for a receiver: call it between init_on"):
        scheme.receive()
    scheme.shutdown()
    with pytest.raises(RuntimeError, match="send is for the sender: call it between init_on"):
        scheme.send()


def test_a_receiver_sends_nothing():
    scheme = pickle.loads(pickle.dumps(scheme_of(policy(1))))
    scheme.init_on_receiver(model=policy(1), worker_idx=0)
    for call in (scheme.send, scheme.send_async, scheme.wait_async):
        with pytest.raises(RuntimeError, match="is for the sender: call it between init_on_sender"):
            call()


def test_a_scheme_that_is_initialised_again_has_no_version():
    scheme = NoWeightSyncScheme()
    for _ in range(2):
        scheme.init_on_sender(model=nn.Linear(2, 1), devices=["cpu"])
        assert (scheme.version, scheme.synchronized_on_sender) == (-1, False)
        scheme.connect()
        scheme.shutdown()


def test_weights_that_are_not_finite_are_refused_as_by_schemes_that_send_them():
    model = policy(1)
    scheme = scheme_of(model)
    scheme.connect()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    for send in (scheme.send, scheme.send_async):
        with pytest.raises(ValueError, match=r"send refused: '0.weight' holds 1 NaN"):
            send()
    scheme.check_finite = False
    scheme.send()


def test_a_scheme_that_was_shut_down_holds_no_model():
    scheme = scheme_of(policy(1))
    scheme.connect()
    scheme.shutdown()
    assert (scheme.model, scheme.version, scheme.num_workers) == (None, 0, 0)
