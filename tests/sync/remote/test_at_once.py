"""Whoever brings a version applies it, if the model rests."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from sync import WorkerRaised
from sync.remote.inbox import ABSENT, LEFT, Answer, deliver
from tests.sync.remote.support import BROUGHT, joined


class Model(nn.Module):
    """One number, and who brought it."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1))
        self.by = ""
        self.refuses = False

    def get_extra_state(self):
        return self.number.item()

    def set_extra_state(self, state):
        if self.refuses:
            raise ValueError("no more of these")
        self.by = threading.current_thread().name


def meet(*, background=True):
    return joined(Model(), Model(), background=background)


def send(scheme, model, number):
    with torch.no_grad():
        model.number.fill_(number)
    scheme.send_async()


def test_the_thread_that_brings_a_version_applies_it_while_the_model_rests():
    with meet() as (scheme, ours, receiver, theirs):
        for number in range(1, 50):
            send(scheme, ours, number)
            scheme.wait_async()
            assert (theirs.number.item(), receiver.version) == (number, number)
            assert theirs.by.startswith(BROUGHT)


def test_a_model_in_use_is_left_alone_and_has_the_version_afterwards():
    with meet() as (scheme, ours, receiver, theirs):
        with receiver.reading() as version:
            send(scheme, ours, 1)
            with pytest.raises(Exception, match="did not acknowledge version 1"):
                scheme.wait_async(timeout=0.5)
            assert (theirs.number.item(), version, receiver.version) == (0, 0, 0)
        scheme.wait_async()
        assert (theirs.number.item(), receiver.version) == (1, 1)


def test_without_the_background_thread_nothing_is_applied_until_it_is_asked_for():
    with meet(background=False) as (scheme, ours, receiver, theirs):
        send(scheme, ours, 1)
        with pytest.raises(Exception, match="did not acknowledge version 1"):
            scheme.wait_async(timeout=0.5)
        assert theirs.number.item() == 0
        assert receiver.receive(5.0) is not None
        scheme.wait_async()
        assert theirs.number.item() == 1
        assert not theirs.by.startswith(BROUGHT)


def test_what_is_raised_by_the_thread_that_brings_it_reaches_the_sender_and_the_next_is_applied():
    with meet() as (scheme, ours, receiver, theirs):
        theirs.refuses = True
        send(scheme, ours, 1)
        with pytest.raises(WorkerRaised, match="no more of these"):
            scheme.wait_async()
        assert receiver.version == 0
        theirs.refuses = False
        send(scheme, ours, 2)
        scheme.wait_async()
        assert (theirs.number.item(), receiver.version) == (2, 2)


def test_after_the_receiver_has_shut_down_nothing_is_applied():
    with meet() as (scheme, ours, receiver, theirs):
        receiver.shutdown()
        send(scheme, ours, 1)
        with pytest.raises(Exception, match="left"):
            scheme.wait_async()
        assert theirs.number.item() == 0


def test_a_successor_that_is_to_come_is_waited_for_where_another_has_left():
    def what_becomes_of_a_block():
        return deliver(torch.zeros(1), *inbox.place, patience_s=0.0).result()

    with meet() as (scheme, _, receiver, theirs):
        inbox = receiver._transports[0].inbox
        receiver.shutdown()
        assert what_becomes_of_a_block() == Answer(LEFT)
        successor = copy.deepcopy(scheme)
        successor.init_on_receiver(model=theirs, worker_idx=0)
        assert what_becomes_of_a_block() == Answer(ABSENT)
