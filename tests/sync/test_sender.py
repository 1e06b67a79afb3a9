"""What is published, to whom, in which version, and what comes back."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictParams

from sync import WeightStrategy, WorkerError
from sync.sender import is_by_worker
from tests.sync.support import (
    EACH,
    FORMS,
    KINDS,
    bits,
    held,
    inside,
    policy,
    receive,
    running,
    sender,
)


@pytest.mark.parametrize(
    ("kind", "form", "strategy"),
    [
        ("shared_copy", "module", "tensordict"),
        ("shared_zero_copy", "tensordict_module", "state_dict"),
        ("multiprocess", "tensordict", "state_dict"),
        ("shared_copy", "nested_dict", "state_dict"),
        ("shared_zero_copy", "tensordict_params", "tensordict"),
        ("multiprocess", "flat_dict", "tensordict"),
    ],
)
def test_weights_of_every_form_may_be_registered_sent_and_received(kind, form, strategy):
    source = inside(FORMS[form](policy(2)))
    scheme = KINDS[kind](strategy=strategy)
    scheme.init_on_sender(weights=source, devices=["cpu"])
    with running(scheme, lambda: inside(FORMS[form](policy(0)))) as (worker,):
        assert worker.do(held) == bits(policy(2))
        WeightStrategy().apply_weights(source, policy(3))
        scheme.send_async()
        assert worker.do(lambda s, m: bits(s.receive())) == bits(policy(3))
        assert worker.do(held) == bits(policy(3))
        for value, other in enumerate(FORMS, 4):
            scheme.send_async(inside(FORMS[other](policy(value))))
            assert worker.do(receive)
            assert worker.do(held) == bits(policy(value))


@EACH
def test_only_the_addressed_workers_get_a_version_and_are_waited_for(kind):
    with running(scheme := sender(kind, workers=3), background=True) as workers:
        scheme.send(policy(2), worker_ids=1)
        assert scheme.acknowledged == {0: 0, 1: 1, 2: 0}
        scheme.send(policy(3), worker_ids=[2, 0, 2])
        assert scheme.acknowledged == {0: 2, 1: 1, 2: 2}
        assert [w.do(held) for w in workers] == [bits(policy(v)) for v in (3, 2, 3)]
        scheme.send(policy(4), worker_ids=[])
        assert (scheme.version, scheme.acknowledged) == (2, {0: 2, 1: 1, 2: 2})


@EACH
def test_an_unknown_worker_is_refused_and_nothing_is_published(kind):
    with running(scheme := sender(kind, workers=2)) as workers:
        for send in (scheme.send, scheme.send_async):
            with pytest.raises(ValueError, match="no worker 2, only 0 to 1"):
                send(worker_ids=[0, 2])
            for odd in (torch.tensor([0]), [1.0], 0.5, "0", True):
                with pytest.raises(ValueError, match=r"no worker .*, only 0 to 1"):
                    send(worker_ids=odd)
        with pytest.raises(ValueError, match="no worker 2, only 0 to 1"):
            scheme.connect(worker_idx=2)
        assert scheme.version == 0
        assert not any(worker.do(receive) for worker in workers)


@EACH
def test_each_worker_may_be_sent_weights_of_its_own(kind):
    scheme = sender(kind, workers=3, per_worker_weights=True)
    with running(scheme, background=True) as workers:
        scheme.send({0: policy(5), 2: TensorDict.from_module(policy(7))})
        assert scheme.acknowledged == {0: 1, 1: 0, 2: 1}
        assert [w.do(held) for w in workers] == [bits(policy(v)) for v in (5, 1, 7)]
        scheme.send({1: policy(8)}, worker_ids=1)
        assert workers[1].do(held) == bits(policy(8))
        with pytest.raises(
            ValueError, match=r"worker_ids=0 and weights for workers \[1\] disagree"
        ):
            scheme.send({1: policy(9)}, worker_ids=0)
        with pytest.raises(ValueError, match="no worker 3"):
            scheme.send({3: policy(9)})
        assert scheme.version == 2


def test_weights_by_worker_are_refused_where_the_scheme_was_not_set_up_for_them():
    with running(scheme := sender("shared_copy", workers=2)) as workers:
        with pytest.raises(ValueError, match=r"needs SharedMem.*\(per_worker_weights=True\)"):
            scheme.send({0: policy(2), 1: policy(3)})
        assert scheme.version == 0
        assert not any(worker.do(receive) for worker in workers)


BAD = {
    "not_finite": (ValueError, "NaN", lambda w: w["0.bias"].fill_(float("nan"))),
    "missing": (KeyError, "lacks '0.bias'", lambda w: w.pop("0.bias")),
    "surplus": (KeyError, "has 'more'", lambda w: w.update(more=torch.ones(1))),
    "misshapen": (ValueError, "'0.bias' has shape", lambda w: w.update({"0.bias": torch.ones(1)})),
    "no_weights": (TypeError, "not a tensor", lambda w: w.update({"0.bias": "text"})),
}


@EACH
def test_weights_that_do_not_fit_are_refused_and_no_worker_changes(kind):
    scheme = sender(kind, workers=2)
    with running(scheme) as workers:
        for error, says, spoil in BAD.values():
            weights = {name: t.clone() for name, t in policy(3).state_dict().items()}
            spoil(weights)
            for send in (scheme.send, scheme.send_async):
                with pytest.raises(error, match=says):
                    send(weights)
        assert scheme.version == 0
        assert not any(worker.do(receive) for worker in workers)
        assert [worker.do(held) for worker in workers] == [bits(policy(1))] * 2
        scheme.send_async(policy(4))  # and goes on
        assert [worker.do(receive) for worker in workers] == [True, True]
        assert [worker.do(held) for worker in workers] == [bits(policy(4))] * 2


@EACH
def test_wait_async_returns_when_every_worker_has_the_newest(kind):
    with running(scheme := sender(kind, workers=2)) as workers:
        scheme.send_async(policy(2))
        with pytest.raises(WorkerError, match=r"worker 1 .* version 1 within 0 s"):
            scheme.wait_async(timeout=0)
        for worker in workers:
            worker.tell(receive, 20)
        scheme.wait_async(timeout=20)
        assert scheme.acknowledged == {0: 1, 1: 1}
        assert [worker.hear() for worker in workers] == [True, True]
        scheme.wait_async(timeout=0)


@EACH
def test_without_sync_a_send_waits_for_nobody(kind):
    with running(scheme := sender(kind, sync=False)) as (worker,):
        scheme.send(policy(2))
        assert scheme.acknowledged == {0: 0}
        assert worker.do(receive, 20)
        assert scheme.acknowledged == {0: 1}


@EACH
def test_parameters_in_a_tensordict_may_be_what_is_trained(kind):
    weights = TensorDictParams(TensorDict.from_module(policy(1)).data.clone())
    scheme = KINDS[kind]()
    scheme.init_on_sender(weights=weights, devices=["cpu"])
    with running(scheme) as (worker,):
        optimiser = torch.optim.SGD(weights.parameters(), lr=1.0)
        weights["0", "weight"].sum().backward()
        optimiser.step()
        scheme.send_async()
        assert worker.do(receive)
        assert worker.do(held) == bits(weights)
        assert (weights["0", "weight"] == 0).all()


@pytest.mark.parametrize(
    ("weights", "by_worker"),
    [
        (None, False),
        ({}, False),
        ({"layer": torch.ones(1)}, False),
        ({0: {"layer": torch.ones(1)}, 3: None}, True),
        ({0: {}, "layer": {}}, False),
        (TensorDict({"0": torch.ones(1)}), False),
        ([torch.ones(1)], False),
    ],
)
def test_a_dict_with_numbers_as_keys_has_the_weights_of_each_worker(weights, by_worker):
    assert is_by_worker(weights) == by_worker
