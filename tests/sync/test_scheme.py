"""The life of a scheme: what it knows and allows at each step, and how it travels."""

from __future__ import annotations

import os
import threading

import pytest
from tensordict import TensorDict
from torch import nn

from sync import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
    WorkerTimeout,
)
from tests.promises.probe import wait_until
from tests.sync.support import (
    EACH_OF_ALL,
    EVERY,
    KINDS,
    ThreadWorker,
    Worker,
    bits,
    connect,
    fill,
    held,
    policy,
    receive,
    running,
    sender,
    tensors,
    version,
)


def known(scheme, model=None):
    return {
        "sender": scheme.initialized_on_sender,
        "receiver": scheme.initialized_on_receiver,
        "sender synchronized": scheme.synchronized_on_sender,
        "receiver synchronized": scheme.synchronized_on_receiver,
        "worker": scheme.worker_idx,
        "version": scheme.version,
        "model id": scheme.model_id,
        "weights": None if scheme.weights is None else bits(scheme.weights),
    }


NOTHING = {
    "sender": False,
    "receiver": False,
    "sender synchronized": False,
    "receiver synchronized": False,
    "worker": None,
    "version": -1,
    "model id": None,
    "weights": None,
}


@EACH_OF_ALL
def test_each_step_is_seen_in_the_properties_of_the_sender(kind):
    scheme, model = EVERY[kind](), policy(1)
    assert known(scheme) == NOTHING
    assert (scheme.model, scheme.context, scheme.num_workers) == (None, None, 0)
    scheme.init_on_sender(model_id="policy", model=model, devices=["cpu"])
    at_first = {**NOTHING, "sender": True, "model id": "policy", "weights": bits(policy(1))}
    assert known(scheme) == at_first
    assert scheme.model is model
    assert (scheme.num_workers, scheme.acknowledged) == (1, {0: -1})
    with running(scheme) as (worker,):
        connected = {**at_first, "sender synchronized": True, "version": 0}
        assert known(scheme) == connected
        assert scheme.acknowledged == {0: 0}
        fill(model, 2)
        scheme.send_async()
        assert known(scheme) == {**connected, "version": 1, "weights": bits(policy(2))}
        worker.do(receive)
        assert scheme.acknowledged == {0: 1}


@EACH_OF_ALL
def test_each_step_is_seen_in_the_properties_of_a_receiver(kind):
    with sender(kind, policy(3)) as scheme, ThreadWorker(scheme) as worker:
        assert worker.do(known) == NOTHING
        worker.do(lambda s, m: s.init_on_receiver(model_id="policy", model=m, worker_idx=0))
        ready = {**NOTHING, "receiver": True, "worker": 0, "model id": "policy"}
        assert worker.do(known) == ready
        worker.meet(scheme)
        connected = {"receiver synchronized": True, "version": 0, "weights": bits(policy(3))}
        assert worker.do(known) == {**ready, **connected}
        assert worker.do(lambda s, m: s.model is m)
        worker.do(lambda s, m: s.shutdown())
        assert worker.do(held) == bits(policy(3))


@EACH_OF_ALL
def test_the_weights_of_both_sides_are_of_one_kind(kind):
    def requires_grad(scheme, model):
        return {name: tensor.requires_grad for name, tensor in tensors(scheme.weights)}

    with running(scheme := sender(kind)) as (worker,):
        assert not any(requires_grad(scheme, None).values())
        assert worker.do(requires_grad) == requires_grad(scheme, None)
        scheme.send_async(policy(2))
        worker.do(receive)
        assert worker.do(lambda s, m: bits(s.weights) == bits(m) == bits(policy(2)))


CALLS = {
    "send": lambda s: s.send(),
    "send_async": lambda s: s.send_async(),
    "wait_async": lambda s: s.wait_async(),
    "receive": lambda s: s.receive(),
    "reading": lambda s: s.reading().__enter__(),
    "connect": lambda s: s.connect(),
    "acknowledged": lambda s: s.acknowledged,
    "stats": lambda s: s.stats,
}


@EACH_OF_ALL
def test_every_call_before_init_and_after_shutdown_is_an_error_that_says_so(kind):
    with running(scheme := sender(kind)):
        pass
    for name, call in CALLS.items():
        with pytest.raises(RuntimeError, match=rf"{name}.*init_on_(sender|receiver)\(\)"):
            call(EVERY[kind]())
        with pytest.raises(RuntimeError, match="shutdown"):
            call(scheme)


@EACH_OF_ALL
def test_a_send_before_connect_is_an_error_that_says_so(kind):
    with sender(kind) as scheme:
        for send in (scheme.send, scheme.send_async):
            with pytest.raises(RuntimeError, match=r"send\(\) before connect\(\)"):
                send()
        assert scheme.version == -1


@EACH_OF_ALL
def test_a_receiver_has_nothing_to_take_before_it_connects(kind):
    with sender(kind) as scheme, ThreadWorker(scheme, worker_idx=0) as worker:
        with pytest.raises(RuntimeError, match=r"receive\(\) before connect\(\)"):
            worker.do(lambda s, m: s.receive())
        with pytest.raises(RuntimeError, match=r"reading\(\) before connect\(\)"):
            worker.do(lambda s, m: s.reading().__enter__())


def test_only_a_worker_that_there_is_has_a_transport():
    scheme = SharedMemWeightSyncScheme()
    with pytest.raises(RuntimeError, match=r"init_on_sender\(\)"):
        scheme.create_transport()
    workers = "worker_idx=2: this scheme has workers 0 to 1"
    with sender("shared_copy", workers=2) as scheme, pytest.raises(ValueError, match=workers):
        scheme.create_transport(worker_idx=2)


@EACH_OF_ALL
def test_a_receiver_cannot_send_and_a_sender_cannot_receive(kind):
    with running(scheme := sender(kind)) as (worker,):
        with pytest.raises(RuntimeError, match="send is for the sender"):
            worker.do(lambda s, m: s.send())
        with pytest.raises(RuntimeError, match="receive is for a receiver"):
            scheme.receive()


def test_a_receiver_needs_a_scheme_that_was_initialised():
    for scheme in (make() for make in EVERY.values()):
        with pytest.raises(RuntimeError, match=r"call init_on_sender\(\) on this scheme first"):
            scheme.init_on_receiver(model=policy(), worker_idx=0)


@EACH_OF_ALL
def test_a_forked_worker_that_was_not_initialised_is_told_so_and_sends_nothing(kind):
    scheme, forgotten = sender(kind, connect_timeout=0.05), r"for a receiver.*init_on_receiver\(\)"
    with scheme, Worker(scheme) as worker, pytest.raises(RuntimeError, match=forgotten):
        worker.do(connect)


@EACH_OF_ALL
def test_a_worker_that_the_scheme_does_not_have_is_refused(kind):
    with sender(kind, workers=2) as scheme, ThreadWorker(scheme) as worker:
        for wrong in (2, -1, None):
            with pytest.raises(ValueError, match=f"worker_idx={wrong}.*workers 0 to 1"):
                worker.do(lambda s, m, i: s.init_on_receiver(model=m, worker_idx=i), wrong)


@pytest.mark.parametrize("kind", ["shared_copy", "multiprocess"])
def test_what_one_worker_is_handed_does_not_grow_with_the_number_of_workers(kind):
    def descriptors(workers):
        with (
            sender(kind, workers=workers) as scheme,
            Worker(scheme, method="forkserver", worker_idx=0) as worker,
        ):
            return worker.do(lambda s, m: len(os.listdir("/proc/self/fd")))

    assert descriptors(40) == descriptors(2)


@EACH_OF_ALL
def test_a_receiver_connects_as_itself_and_brings_no_weights(kind):
    with sender(kind) as scheme, ThreadWorker(scheme, worker_idx=0) as worker:
        with pytest.raises(ValueError, match="this receiver is worker 0, not 1"):
            worker.do(lambda s, m: s.connect(worker_idx=1))
        with pytest.raises(ValueError, match="is for the sender"):
            worker.do(lambda s, m: s.connect(weights=policy(1)))


@EACH_OF_ALL
def test_a_rendezvous_is_bounded_on_both_sides(kind):
    scheme = sender(kind, connect_timeout=0.05)
    with scheme, ThreadWorker(scheme, worker_idx=0) as worker, pytest.raises(TimeoutError):
        worker.do(connect)
    message = r"worker 0 .* within 0\.05 s"
    with sender(kind, connect_timeout=0.05) as scheme, pytest.raises(WorkerTimeout, match=message):
        scheme.connect()


def test_connect_is_bounded_in_total_although_each_worker_has_its_own_weights(monkeypatch):
    now, outcome = [0.0], []
    monkeypatch.setattr("sync.sender.awake_s", lambda: now[0])
    scheme = MultiProcessWeightSyncScheme(connect_timeout=1.0)
    scheme.init_on_sender(params_map={0: policy(1), 1: policy(2)})

    def connect_all():
        try:
            scheme.connect()
        except WorkerTimeout as error:
            outcome.append(error.worker_idx)

    connecting = threading.Thread(target=connect_all)
    with scheme, ThreadWorker(scheme, worker_idx=0) as worker:
        connecting.start()
        now[0] = 0.8
        worker.do(connect)
        wait_until(lambda: scheme.acknowledged[0] == 0 or not connecting.is_alive())
        now[0] = 1.1
        connecting.join(10)
        now[0] = 100.0  # so that it ends in any case
        assert outcome == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_connect_hands_over_explicit_weights_and_the_model_stays(kind):
    model = policy(1)
    with sender(kind, model) as scheme, ThreadWorker(scheme, worker_idx=0) as worker:
        worker.meet(scheme, weights=policy(6))
        assert worker.do(held) == bits(policy(6))
        assert bits(model) == bits(policy(1))
        scheme.send_async()
        worker.do(receive)
        assert worker.do(held) == bits(model)


@EACH_OF_ALL
def test_workers_may_be_met_one_by_one(kind):
    scheme = sender(kind, policy(3), workers=2)
    with (
        scheme,
        ThreadWorker(scheme, worker_idx=0) as first,
        ThreadWorker(scheme, worker_idx=1) as second,
    ):
        for index, worker in enumerate((first, second)):
            assert not scheme.synchronized_on_sender
            worker.meet(scheme, worker_idx=index)
            assert worker.do(version) == 0
        assert scheme.synchronized_on_sender
        assert first.do(held) == second.do(held) == bits(policy(3))


@EACH_OF_ALL
def test_shutdown_may_be_called_twice_and_before_anything(kind):
    with running(connected := sender(kind)) as (worker,):
        for _ in range(2):
            worker.do(lambda s, m: s.shutdown())
    for scheme in (EVERY[kind](), sender(kind), connected):
        scheme.shutdown()
        scheme.shutdown()
        with scheme as entered:
            assert entered is scheme


@EACH_OF_ALL
def test_a_scheme_may_be_initialised_again_after_shutdown_or_over_itself(kind):
    with running(scheme := sender(kind, policy(1))) as (worker,):
        scheme.init_on_sender(model=policy(2), devices=["cpu"] * 2)
        assert (scheme.version, scheme.synchronized_on_sender, scheme.num_workers) == (-1, False, 2)
        with pytest.raises(ConnectionError, match="the sender is gone"):
            worker.do(lambda s, m: s.receive(timeout=20))
    scheme.init_on_sender(model=policy(3), devices=["cpu"])
    with running(scheme) as (worker,):
        assert worker.do(held) == bits(policy(3))


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
def test_prepared_weights_are_of_what_is_given_else_the_context_else_the_model(form):
    class Context:
        def get_model(self, model_id):
            return {"policy": policy(2), "other": policy(3)}[model_id]

    with KINDS["shared_copy"](strategy=form) as scheme:
        context = Context()
        scheme.init_on_sender(model_id="policy", context=context)
        expected = TensorDict if form == "tensordict" else dict
        for weights, value in [
            (scheme.prepare_weights(policy(1)), 1),
            (scheme.prepare_weights(context=context), 2),
            (scheme.prepare_weights(None, "other", None, context), 3),
            (scheme.prepare_weights(), 2),
        ]:
            assert isinstance(weights, expected)
            assert bits(weights) == bits(policy(value))
        for weights in (policy(1), None):
            flat = scheme.prepare_weights(weights, "policy", WeightStrategy("state_dict"))
            assert list(flat) == list(policy().state_dict())


@EACH_OF_ALL
def test_weights_can_be_applied_by_hand_on_both_sides(kind):
    model = policy(1)
    with running(scheme := sender(kind, model)) as (worker,):
        for value, inplace in ((4, True), (6, False)):
            worker.do(lambda s, m, v, i: s.apply_weights(policy(v), i), value + 1, inplace)
            assert worker.do(held) == bits(policy(value + 1))
            assert bits(model) != bits(policy(value + 1))
            scheme.apply_weights(policy(value), inplace)
            assert bits(model) == bits(policy(value))
            scheme.send_async()
            assert worker.do(receive)
            assert worker.do(held) == bits(policy(value))
        with pytest.raises(KeyError, match="lacks"):
            scheme.apply_weights({})


def test_weights_can_be_applied_only_once_there_is_a_model():
    with pytest.raises(RuntimeError, match=r"apply_weights\(\) needs init_on_sender"):
        KINDS["shared_copy"]().apply_weights(policy(1))


@EACH_OF_ALL
def test_a_lazy_model_is_refused_before_anything_is_started(kind):
    scheme = EVERY[kind]()
    with pytest.raises(ValueError, match=r"'weight' is not initialised.*run the model once"):
        scheme.init_on_sender(model=nn.LazyLinear(3), devices=["cpu"])
    assert not scheme.initialized_on_sender


@EACH_OF_ALL
def test_the_older_spelling_does_the_same(kind):
    def take(scheme, model):
        scheme.init_on_worker(model=model, worker_idx=0)
        scheme.synchronize_weights(background=False)

    with sender(kind, policy(3)) as scheme, ThreadWorker(scheme) as worker:
        worker.tell(take)
        scheme.synchronize_weights()
        worker.hear()
        assert worker.do(held) == bits(policy(3))
        worker.tell(receive, 20)
        scheme.update_weights(policy(4))
        assert worker.hear()
        assert worker.do(held) == bits(policy(4))
        for view in ("create_sender", "get_sender", "create_receiver", "get_receiver"):
            assert getattr(scheme, view)() is scheme


def test_a_scheme_is_abstract_and_names_its_strategies():
    with pytest.raises(TypeError, match="abstract"):
        WeightSyncScheme()
    with pytest.raises(ValueError, match="expected 'tensordict' or 'state_dict'"):
        KINDS["shared_copy"](strategy="safetensors")
    assert KINDS["shared_copy"](strategy=WeightStrategy("state_dict")).strategy.extract_as == (
        "state_dict"
    )


def test_what_is_said_about_a_worker_is_in_its_errors_and_harms_no_worker_without_a_model():
    with sender("shared_copy", policy(3), connect_timeout=0.05) as scheme:
        scheme.describe_worker(0, "CartPole-v1")
        with pytest.raises(WorkerTimeout, match=r"worker 0 \(.*CartPole-v1\) did not connect"):
            scheme.connect()
        scheme.connect_timeout = 30
        with ThreadWorker(scheme, None) as worker:
            worker.do(lambda s, m: s.init_on_receiver(worker_idx=0))
