"""An interrupt (Ctrl-C) anywhere in a call is survived: the next versions come as if it had not."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time

import pytest

from tests.interrupts import Interrupt, nothing_left, places
from tests.sync.support import bits, policy
from tests.sync.test_same_process import in_one_thread
from tests.sync.test_scheme import EVERY, sender

FEW = pytest.param(4, id="few")
ALL = pytest.param(None, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


def nothing(scheme, receiver, model):
    """Nothing comes before a send."""


def send(scheme, receiver, model):
    scheme.send_async(model)


def receive(scheme, receiver, model):
    receiver.receive()


def collect(scheme, receiver, model):
    scheme.acknowledged  # noqa: B018


def send_and_receive(scheme, receiver, model):
    send(scheme, receiver, model)
    receive(scheme, receiver, model)


@pytest.mark.parametrize(
    ("before", "call"), [(nothing, send), (send, receive), (send_and_receive, collect)]
)
@pytest.mark.parametrize("kind", EVERY)
def test_an_interrupt_at_any_instruction_cuts_nobody_off(kind, before, call):
    with in_one_thread(scheme := sender(kind)) as (receiver,):
        for number in itertools.count(1):
            before(scheme, receiver, model := policy(number))
            with Interrupt(number, "sync") as interrupt:
                call(scheme, receiver, model)
            # The next version comes, is acknowledged, and is what the worker has.
            scheme.send_async(policy(-number))
            # A feeder thread may be at it, too; it is given time, but never more than it needs.
            deadline = time.monotonic() + 5.0
            while receiver.version != scheme.version and time.monotonic() < deadline:
                receive(scheme, receiver, model)
                collect(scheme, receiver, model)
            assert bits(receiver.model) == bits(policy(-number)), f"instruction {number}"
            scheme.wait_async(5.0)
            if not interrupt.fired:
                return


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


@pytest.mark.parametrize("most", [FEW, ALL])
@pytest.mark.parametrize("kind", EVERY)
def test_a_life_that_is_interrupted_anywhere_leaves_nothing(kind, most, capfd):
    live(kind)
    for number in places(lambda: live(kind), "sync", most=most):
        with nothing_left() as check:
            with Interrupt(number, "sync") as interrupt:
                live(kind)
            check(f"{number}: {interrupt.where}")
    assert capfd.readouterr() == ("", "")
