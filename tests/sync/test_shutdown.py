"""What a scheme lets go of at `shutdown`, and what it still says afterwards."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from pathlib import Path

import pytest

from sync import NoWeightSyncScheme
from tests.own_process import in_own_process
from tests.promises.probe import wait_until
from tests.sync.support import EACH_OF_ALL, bits, in_one_thread, policy, running, sender
from tests.sync.test_scheme import NOTHING, known


def shared_blocks():
    """How much of this process's memory is shared blocks, and how many descriptors it holds."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:lockstep"), len(os.listdir("/proc/self/fd"))


@EACH_OF_ALL
@in_own_process
def test_memory_and_descriptors_are_let_go_while_the_scheme_lives(kind):
    before = shared_blocks()
    with in_one_thread(scheme := sender(kind)) as (receiver,):
        scheme.send_async(policy(2))
        receiver.receive()
        receiver.receive()
        assert shared_blocks() > before
    assert shared_blocks() == before
    assert (scheme.version, receiver.version) == (1, 1)
    with running(scheme := sender(kind, workers=3), background=True):
        scheme.send_async(policy(2))
        scheme.wait_async(20)
    assert shared_blocks() == before


@EACH_OF_ALL
def test_the_trainers_model_is_let_go(kind):
    scheme = sender(kind, model := policy(1))
    gone = weakref.ref(model)
    scheme.shutdown()
    del model
    gc.collect()
    assert gone() is None


@EACH_OF_ALL
def test_afterwards_only_the_last_version_is_known(kind):
    with in_one_thread(scheme := sender(kind, workers=2), 2) as receivers:
        scheme.send_async()
        models = [receiver.model for receiver in receivers]
        for receiver in receivers:
            receiver.receive()
    assert [bits(model) for model in models] == [bits(policy(1))] * 2
    for end in (scheme, *receivers):
        assert known(end) == {**NOTHING, "version": 1}
        assert (end.model, end.num_workers, end.context) == (None, 0, None)


def test_the_empty_scheme_lets_go_too():
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender(model=policy(1), devices=["cpu"])
    scheme.connect()
    scheme.shutdown()
    assert known(scheme) == {**NOTHING, "version": 0}
    assert scheme.model is None


@pytest.mark.parametrize("call", ["send_async", "wait_async"])
@EACH_OF_ALL
def test_a_shutdown_while_other_threads_send_is_what_they_are_told(kind, call):
    ends = []

    def send_on(scheme):
        try:
            while len(ends) < 2:
                scheme.send_async()
                getattr(scheme, call)()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
            ends.append(error)

    def take(receiver):
        with contextlib.suppress(ConnectionError, RuntimeError):
            while len(ends) < 2:
                receiver.receive(0.1)

    with in_one_thread(scheme := sender(kind)) as (receiver,):
        threads = [threading.Thread(target=send_on, args=(scheme,)) for _ in range(2)]
        threads.append(threading.Thread(target=take, args=(receiver,)))
        for thread in threads:
            thread.start()
        wait_until(lambda: scheme.version >= 20)
        scheme.shutdown()
        for thread in threads:
            thread.join(30)
    assert [type(end) for end in ends] == [RuntimeError] * 2
    assert all("shutdown()" in str(end) for end in ends)
