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
