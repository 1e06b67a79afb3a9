"""Deliveries end when the worker answers, and none waits for a thread."""

from __future__ import annotations

import threading

import pytest
import torch

from sync.channel_interface import APPLIED, FAILED, JOINED, LEFT, Answer
from sync.local.waiting import wait_for
from sync.model.block import NEVER, Layout, private_snapshot
from sync.remote.inbox import (
    NOTHING,
    SUPERSEDED,
    Inbox,
    Reply,
    close_all,
    close_inbox,
    deliver,
)


@pytest.fixture
def key(request):
    yield request.node.name
    close_inbox(request.node.name, 0)


LAYOUT = Layout.of({"number": torch.zeros((), dtype=torch.long)})


def opened(key):
    found = Inbox(key, LAYOUT, 0)
    found.open()
    return found


@pytest.fixture
def inbox(key):
    found = opened(key)
    yield found
    found.close()


def block(number):
    whole = private_snapshot(LAYOUT)
    whole.stamp(number, b"")
    return whole.buffer


def delivered(key, inbox, number):
    return deliver(block(number), key, 0, inbox.owner)


def taken(inbox):
    return inbox.take().version


def kind(future):
    return future.result(0).answer.kind


def test_a_delivery_waits_for_a_worker_that_has_not_come_yet(key):
    threads = threading.active_count()
    older, newer = deliver(NOTHING, key, 0, ""), deliver(NOTHING, key, 0, "")
    assert kind(older) == SUPERSEDED
    assert not newer.done()
    assert threading.active_count() == threads
    inbox = opened(key)
    assert newer.result(0).owner == inbox.owner
    inbox.close()


def test_an_answer_ends_the_delivery_that_was_taken(inbox, key):
    first = delivered(key, inbox, 1)
    assert inbox.has_news()
    assert taken(inbox) == 1
    assert not inbox.has_news()
    assert inbox.take() is None
    assert wait_for(inbox.fds(), 0) == []
    second = delivered(key, inbox, 2)
    applied = Answer(0, APPLIED, 1, seen_ns=10, applied_ns=30, retries=3)
    inbox.answer(applied)
    assert first.result(0) == Reply(applied, inbox.owner)
    assert not second.done()
    assert taken(inbox) == 2


def test_a_newer_delivery_takes_an_older_ones_place(inbox, key):
    older, newer = (delivered(key, inbox, n) for n in (1, 2))
    assert kind(older) == SUPERSEDED
    assert taken(inbox) == 2
    assert not newer.done()


def test_a_block_for_a_predecessor_is_dropped(inbox, key):
    assert deliver(block(1), key, 0, "another").result(0).owner == inbox.owner
    assert kind(deliver(block(1), key, 0, "another")) == JOINED
    assert not inbox.has_news()


def test_who_can_take_nothing_says_so_to_all(inbox, key):
    waiting = delivered(key, inbox, 1)
    inbox.answer(Answer(0, FAILED, NEVER, text="another shape"))
    later = delivered(key, inbox, 2)
    inbox.close()
    last = delivered(key, inbox, 3)
    for future in (waiting, later, last):
        assert (kind(future), future.result(0).answer.text) == (FAILED, "another shape")


def test_who_left_says_so_until_another_is_expected(inbox, key):
    first = delivered(key, inbox, 1)
    inbox.take()
    waiting = delivered(key, inbox, 2)
    inbox.close()
    assert [kind(first), kind(waiting)] == [LEFT, LEFT]
    assert kind(deliver(NOTHING, key, 0, "")) == LEFT
    Inbox(key, LAYOUT, 0)
    assert not deliver(NOTHING, key, 0, "").done()


@pytest.mark.parametrize("close", [lambda key: close_inbox(key, 0), lambda key: close_all("down")])
def test_when_the_trainer_is_gone_workers_wake_and_deliveries_end(inbox, key, close):
    waiting, absent = delivered(key, inbox, 1), deliver(NOTHING, key, 0, "x")
    elsewhere = deliver(NOTHING, f"{key} elsewhere", 0, "")
    close(key)
    assert inbox.sender_gone()
    assert kind(waiting) == LEFT
    assert absent.done()
    close_all("down")
    assert kind(elsewhere) == LEFT
    assert kind(delivered(key, inbox, 2)) == LEFT
