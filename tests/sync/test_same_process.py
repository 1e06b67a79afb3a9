"""A sender and its workers in one process: each worker has a deep copy of the scheme."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading

import pytest

from tests.own_process import in_own_process
from tests.sync.remote.support import joined
from tests.sync.support import bits, fill, policy
from tests.sync.test_scheme import EACH, sender


@contextlib.contextmanager
def in_one_thread(scheme, workers=1):
    """Receivers, met in one thread: another is needed only while `connect` waits for both sides."""
    receivers = [copy.deepcopy(scheme) for _ in range(workers)]
    for worker, receiver in enumerate(receivers):
        receiver.init_on_receiver(model=policy(), worker_idx=worker)
    meeting = threading.Thread(target=scheme.connect)
    meeting.start()
    for receiver in receivers:
        receiver.connect(background=False)
    meeting.join(20)
    try:
        yield receivers
    finally:
        for receiver in receivers:
            receiver.shutdown()
        scheme.shutdown()


@EACH
def test_a_deep_copy_of_a_sender_is_a_receiver_in_the_same_thread(kind):
    with in_one_thread(scheme := sender(kind, policy(3))) as (receiver,):
        assert bits(receiver.model) == bits(policy(3))
        for number in range(1, 100):
            scheme.send_async(policy(number))
            assert receiver.receive() is not None
            scheme.wait_async()
            assert bits(receiver.model) == bits(policy(number))
            assert receiver.version == scheme.version == number
            assert scheme.acknowledged == {0: number}
            assert receiver.receive() is None


@EACH
def test_each_worker_of_one_process_is_addressed_on_its_own(kind):
    scheme = sender(kind, workers=2, connect_timeout=10)
    with in_one_thread(scheme, 2) as (one, other):
        if kind != "hogwild":  # its workers have the trainer's own parameters
            scheme.send_async(policy(5), worker_ids=[1])
            assert (one.receive(), other.receive() is None) == (None, False)
            assert bits(one.model) == bits(policy(1))
            assert bits(other.model) == bits(policy(5))
        one.shutdown()
        scheme.send_async(policy(6), worker_ids=1)
        assert other.receive() is not None
        assert bits(other.model) == bits(policy(6))


@EACH
def test_a_worker_of_the_same_process_may_be_replaced(kind):
    with in_one_thread(scheme := sender(kind)) as (first,):
        first.shutdown()
        second = copy.deepcopy(scheme)
        second.init_on_receiver(model=policy(), worker_idx=0)
        meeting = threading.Thread(target=scheme.connect, kwargs={"worker_idx": 0})
        meeting.start()
        second.connect(background=False)
        meeting.join(20)
        scheme.send_async(policy(4))
        assert second.receive() is not None
        scheme.wait_async()
        assert bits(second.model) == bits(policy(4))
        assert scheme.stats["workers"][0]["restarts"] == 1
        second.shutdown()


@EACH
@in_own_process
def test_neither_end_takes_the_others_memory_or_descriptors_with_it(kind):
    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(3):
        with in_one_thread(scheme := sender(kind)) as (receiver,):
            scheme.send_async(policy(2))
            receiver.receive()
    del scheme, receiver
    assert count() == before


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_weights_received_without_a_model_are_in_new_memory_each_time(strategy):
    model = policy(1)
    with joined(model, None, background=False, strategy=strategy) as (scheme, _, receiver, _):
        received = []
        for value in (2, 3):
            fill(model, value)
            scheme.send_async()
            received.append(receiver.receive(20))
        assert [bits(weights) for weights in received] == [bits(policy(2)), bits(policy(3))]
