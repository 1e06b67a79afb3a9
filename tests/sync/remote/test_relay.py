"""What a node passes on and says, with nodes below and workers that the test moves."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
import torch

from sync.channel import APPLIED, Answer
from sync.remote import blocks
from sync.remote.inbox import Inbox, Reply
from sync.remote.relay import (
    CUT,
    NOTHING,
    RECEIVED,
    UNREACHED,
    Gathered,
    Link,
    News,
    close,
    connect,
    pass_on,
)
from sync.remote.tree import Branch
from tests.promises.probe import wait_until

OTHER = News(4, 8, Reply(Answer(4, APPLIED, 3), "owner 4"))


class Parent:
    """A link to worker 0's node in this process, below which is worker 4, whom the test plays."""

    def __init__(self, key):
        self.key = key
        self.inbox = Inbox(key, 0)
        self.below, self.heard, self.calls = [], [], []
        connect(key, 0, 4, self._post_below)
        self.link = Link(self._post, NOTHING, lambda news, error: self.heard.extend(news))

    def _post(self, function, block, *args):
        self.calls.append(function.__name__)
        return function(block, *args)

    def _post_below(self, function, block, *args):
        self.below.append(Future())
        return self.below[-1]

    def send(self, block, serial=7):
        branch = Branch(0, self.inbox.owner, serial, [Branch(4, "owner 4", serial + 1, [])])
        return self.link.send(block, self.key, self.key, branch)

    def apply(self):
        assert self.inbox.take() is not None
        self.inbox.answer(Answer(0, APPLIED, 3))

    def said(self):
        return {
            (one.serial, one.what if isinstance(one.what, str) else one.what.answer.kind)
            for one in self.heard
        }


@pytest.fixture
def parent(request):
    found = Parent(request.node.name)
    yield found
    found.inbox.leave()
    close(found.key, 0)


def block():
    return torch.ones(4, dtype=torch.uint8)


def test_a_node_says_at_once_and_in_one_message_that_all_have_answered(parent):
    sent = parent.send(block())
    parent.apply()
    assert not sent.done()
    parent.below[0].set_result(Gathered([OTHER], False))
    assert parent.said() == {(7, APPLIED), (8, APPLIED)}
    assert parent.calls == [pass_on.__name__]
    assert OTHER.what in [one.what for one in parent.heard]


def test_nobodys_answer_waits_long_for_anothers(parent):
    parent.send(block())
    parent.apply()
    begun = time.monotonic()
    wait_until(lambda: (7, APPLIED) in parent.said())
    assert time.monotonic() - begun < 1.0
    parent.below[0].set_result(Gathered([OTHER], False))
    wait_until(lambda: (8, APPLIED) in parent.said())


def test_who_has_a_version_and_does_not_answer_is_known_to_have_it(parent):
    parent.send(block())
    wait_until(lambda: (7, RECEIVED) in parent.said())
    assert (8, RECEIVED) not in parent.said()


def test_who_cannot_be_reached_is_told_of_at_once(parent):
    parent.send(block())
    parent.below[0].set_exception(ConnectionError("it is gone"))
    wait_until(lambda: {(8, UNREACHED), (-1, CUT)} <= parent.said())


def test_a_node_that_is_connected_anew_is_asked_though_an_earlier_call_never_returns(parent):
    parent.send(torch.zeros(1, dtype=torch.uint8))  # to the node below, which says nothing
    connect(parent.key, 0, 4, parent._post_below)
    parent.apply()
    parent.send(torch.zeros(1, dtype=torch.uint8), serial=17)
    parent.below[1].set_result(Gathered([News(4, 18, RECEIVED)], more=True))
    wait_until(lambda: len(parent.below) == 3)  # it asks for the rest
    parent.below[2].set_result(Gathered([OTHER._replace(serial=18)], more=False))
    wait_until(lambda: (18, APPLIED) in parent.said())


def test_the_time_that_an_answer_waited_is_known(parent):
    parent.send(block())
    parent.apply()
    wait_until(lambda: bool(parent.heard))
    held_ms = next(one.held_ns for one in parent.heard if one.serial == 7) / 1e6
    assert 1.0 < held_ms < 1000.0


def test_memory_is_not_given_back_before_it_was_passed_on(parent):
    lent = blocks.lend_block(1001)
    parent.send(lent)
    parent.apply()
    other = blocks.lend_block(1001)
    assert other is not lent  # a node below may not have read it
    parent.below[0].set_result(Gathered([OTHER], False))
    assert blocks.lend_block(1001) is lent
    del other


def test_memory_that_a_lost_node_may_still_be_sent_is_never_given_back(parent):
    lent = blocks.lend_block(1003)
    parent.send(lent)
    parent.apply()
    parent.below[0].set_exception(ConnectionError("it is gone"))
    assert blocks.lend_block(1003) is not lent
