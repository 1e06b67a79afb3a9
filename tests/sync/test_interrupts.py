"""An interrupt (Ctrl-C) anywhere in a call closes the scheme, and leaves nothing half done."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading

import pytest

from sync import WorkerDied
from tests.interrupts import Interrupt, nothing_left, places
from tests.sync.support import EVERY, KINDS, bits, in_one_thread, policy, sender

# Schemes of each way in which versions travel; the others share their code.
QUICK = ("shared_zero_copy", "multiprocess")
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


def every_fifth(kinds):
    """Every fifth place for two kinds; all places for all kinds are slow tests."""
    return [*((kind, 5) for kind in QUICK), *(pytest.param(k, 1, marks=SLOW) for k in kinds)]


@pytest.mark.parametrize(("kind", "step"), every_fifth(KINDS))
def test_an_interrupted_send_closes_the_sender_and_leaves_the_workers_whole(kind, step):
    for number in itertools.count(1, step):
        with in_one_thread(scheme := sender(kind)) as (receiver,):
            with Interrupt(number, "sync") as interrupt:
                scheme.send_async(policy(number))
            if not interrupt.fired:
                return
            if scheme.initialized_on_sender:  # it came before the call began, or after its end
                scheme.send_async(policy(-number))
                while receiver.version != scheme.version:
                    receiver.receive()
            receiver.receive()
            assert bits(receiver.model) in [bits(policy(value)) for value in (1, number, -number)]


@pytest.mark.parametrize(("kind", "step"), every_fifth(EVERY))
def test_an_interrupted_receive_closes_the_receiver_and_the_sender_hears_of_it(kind, step):
    for number in itertools.count(1, step):
        with in_one_thread(scheme := sender(kind)) as (receiver,):
            scheme.send_async(policy(number))
            with Interrupt(number, "sync") as interrupt:
                receiver.receive()
            if not interrupt.fired:
                return
            if receiver.initialized_on_receiver:  # it came before the call began, or after its end
                receiver.receive()
                scheme.wait_async(5.0)
                continue
            with pytest.raises(RuntimeError, match="shutdown"):
                receiver.receive()
            with pytest.raises(WorkerDied, match="left: it shut its scheme down"):
                scheme.send(policy(-number))


def live(kind, background=True):
    """The life of a sender and of a worker, whose first weights come while the other waits."""
    with EVERY[kind](connect_timeout=5.0) as scheme:
        scheme.init_on_sender(model=policy(1), devices=["cpu"])
        receiver = copy.deepcopy(scheme)
        receiver.init_on_receiver(model=policy(), worker_idx=0)

        def meet():
            with contextlib.suppress(ConnectionError, RuntimeError):  # it is interrupted there
                receiver.connect(background=background)

        meeting = threading.Thread(target=meet)
        meeting.start()
        scheme.connect()
        meeting.join()
        scheme.send_async(policy(2))
        receiver.receive(timeout=5.0)
        with receiver.reading():
            assert bits(receiver.model) == bits(policy(2))
        scheme.wait_async()
        receiver.shutdown()


@pytest.mark.parametrize(
    ("kind", "most"),
    [*((kind, 4) for kind in QUICK), *(pytest.param(kind, None, marks=SLOW) for kind in EVERY)],
)
def test_a_life_that_is_interrupted_anywhere_leaves_nothing(kind, most, capfd):
    live(kind)
    for number in places(lambda: live(kind), "sync", most=most):
        with nothing_left() as check:
            with Interrupt(number, "sync") as interrupt:
                live(kind)
            check(f"{number}: {interrupt.where}")
    assert capfd.readouterr() == ("", "")
